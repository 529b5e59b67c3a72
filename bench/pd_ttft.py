"""What do separate prefill and decode ranks cost a lone request? Against one unified rank.

    python -m bench.pd_ttft [--tokens 1000] [--pairs 30] [--threads 1] [--model smollm2-135m]

Starts both servers on this machine, each rank with as many threads, and asks them in turn for the
same prompt of random token ids, so that a busy machine slows both. Of each answer: the time to its
first token, and from the first to the second, before which the KV has to cross. Prints a Markdown
table; the difference of medians is of the pairs' differences.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx

from core.clock import Clock, RealClock

ANTIPHON = Path(sys.executable).with_name("antiphon")
START_S = 120.0
TOKENS = 8  # of an answer
VOCABULARY = range(1000, 30_000)


class Answer(NamedTuple):
    """Seconds."""

    first: float  # to the first token
    second: float  # from there to the second


class Server:
    """One running cluster."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self._clock = clock

    def ask(self, prompt: list[int]) -> Answer:
        """Send one prompt; nothing else is in flight."""
        body = {
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        began = self._clock.now()
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            first, second, *_ = [self._clock.now() for _ in lines]
        return Answer(first - began, second - first)

    def sent_bytes(self) -> int:
        """KV bytes that its prefill ranks have sent."""
        ranks = self._client.get("/status").json()["ranks"]
        return sum(rank["load"]["kv_bytes_sent"] for rank in ranks)


@contextmanager
def serving(clock: Clock, *words: str) -> Iterator[Server]:
    """A cluster of its own process, stopped at the end."""
    process = subprocess.Popen(
        [ANTIPHON, "serve", *words, "router.port=0", "router.grpc=false"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("ready: "):
                yield Server(line.split(" on ")[1].split()[0], clock)
                break
        else:
            raise SystemExit(f"antiphon serve {' '.join(words)} did not start")
    finally:
        process.terminate()
        process.stdout.close()
        process.wait(START_S)


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runtime", default="process", choices=("process", "ray", "local"))
    options = parser.parse_args(words)
    common = ("--model", options.model, f"cluster.runtime={options.runtime}")
    threads = [f"{group}.threads={options.threads}" for group in ("prefill", "decode")]
    draw, clock = random.Random(0), RealClock()
    with ExitStack() as stack:
        unified = stack.enter_context(
            serving(clock, "cpu-unified", *common, f"unified.threads={options.threads}")
        )
        pair = stack.enter_context(
            serving(clock, "cpu", *common, *threads, "disagg.local_prefill=off")
        )
        before, rounds = pair.sent_bytes(), []
        for _ in range(options.pairs + 2):
            prompt = draw.choices(VOCABULARY, k=options.tokens)
            rounds.append((unified.ask(prompt), pair.ask(prompt)))
        sent = (pair.sent_bytes() - before) / len(rounds)
    report(rounds[2:], options.tokens, sent)
    return 0


def report(rounds: list[tuple[Answer, Answer]], tokens: int, sent: float) -> None:
    """The table: medians, and the median of the differences."""
    print(f"{len(rounds)} pairs, {tokens} tokens, {sent / 2**20:.1f} MiB of KV each\n")
    print("| median | unified | prefill/decode | difference |\n| --- | ---: | ---: | ---: |")
    for name, field in (("first token", 0), ("second token after it", 1)):
        one = [a[field] for a, _ in rounds]
        two = [b[field] for _, b in rounds]
        apart = median(b - a for a, b in zip(one, two, strict=True))
        cells = (f"{1000 * seconds:.1f} ms" for seconds in (median(one), median(two), apart))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
