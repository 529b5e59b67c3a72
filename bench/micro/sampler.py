"""What choosing tokens costs: ``python -m bench.micro.sampler [--threads 2] [--repeats 15]``.

Prints a markdown table of milliseconds a step: penalties and all, as the runner does it. Flat
logits (normal, deviation 1) are the worst case of top-p, which leaves most of the vocabulary;
peaked ones fall with a token's rank as a language model's do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bench.micro.timing import load_line, measure
from core.wire import SamplingParams
from worker.plan import SampleRow
from worker.sampling.adjust import adjust
from worker.sampling.sampler import sample

ROWS = (1, 16, 64)
VOCABULARIES = (49_152, 129_280)  # SmolLM2's, DeepSeek-V3's
PROMPT, OUTPUT = 512, 256  # tokens that penalties look at
RANK_EXPONENT = 1.5  # of the peaked logits: probability falls with rank to this power
END = frozenset({2})


@dataclass(frozen=True, slots=True)
class Case:
    """What all rows of a step ask for."""

    name: str
    params: dict[str, Any]  # of SamplingParams
    peaked: bool = False

    def rows(self, count: int, vocab: int) -> tuple[SampleRow, ...]:
        draw = np.random.default_rng(1)
        return tuple(
            SampleRow(
                index,
                OUTPUT + index,
                SamplingParams(max_new_tokens=999, seed=index, **self.params),
                draw.integers(vocab, size=PROMPT, dtype=np.int32),
                draw.integers(vocab, size=OUTPUT, dtype=np.int32),
            )
            for index in range(count)
        )

    def logits(self, count: int, vocab: int) -> Float[Tensor, "count vocab"]:
        generator = torch.Generator().manual_seed(2)
        if not self.peaked:
            return torch.randn(count, vocab, generator=generator)
        falling = -RANK_EXPONENT * torch.arange(1, vocab + 1).log()
        return torch.stack(
            [falling[torch.randperm(vocab, generator=generator)] for _ in range(count)]
        )


CASES = (
    Case("greedy", {"temperature": 0.0}),
    Case("greedy, penalties", {"temperature": 0.0, "repetition_penalty": 1.1}),
    Case("temperature 0.8", {"temperature": 0.8}),
    Case("temperature 0.8", {"temperature": 0.8}, peaked=True),
    Case("top-p 0.95", {"top_p": 0.95}),
    Case("top-p 0.95", {"top_p": 0.95}, peaked=True),
    Case("top-k 50", {"top_k": 50}),
    Case("top-k 50, top-p 0.9, min-p 0.02", {"top_k": 50, "top_p": 0.9, "min_p": 0.02}),
    Case(
        "top-p 0.95, penalties",
        {"top_p": 0.95, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        peaked=True,
    ),
)


def table(repeats: int) -> Iterator[str]:
    """The lines of the table."""
    yield f"Sampling, ms a step, {torch.get_num_threads()} threads. {load_line()}\n"
    yield "| vocabulary | rows ask for | logits | rows | least | quartile | median |"
    yield "|---:|---|---|---:|---:|---:|---:|"
    for vocab in VOCABULARIES:
        for case in CASES:
            for count in ROWS:
                logits, rows = case.logits(count, vocab), case.rows(count, vocab)
                times = measure(lambda: sample(adjust(logits, rows, END), rows), repeats)  # noqa: B023 # runs at once
                kind = "peaked" if case.peaked else "flat"
                yield f"| {vocab:,} | {case.name} | {kind} | {count} | {times.cells(1e-3)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.micro.sampler")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    with torch.inference_mode():
        for line in table(given.repeats):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
