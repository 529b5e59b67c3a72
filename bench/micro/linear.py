"""The packed linear kernel against torch's: ``python -m bench.micro.linear [--threads 2]``.

Prints a markdown table over SmolLM2's matrices in bf16: microseconds of a product by torch's
F.linear, by oneDNN with a prepacked weight, and by our kernel, in turns; the fastest of many
counts. As many weights take turns as fill CACHE_BYTES, so that they come from memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import PreflightError
from worker.kernels.load import problem

MATRICES = {
    "qkv": (960, 576),
    "out": (576, 576),
    "gate-up": (3072, 576),
    "down": (576, 1536),
    "LM head": (49152, 576),
}  # outer, inner
ROWS = (1, 4, 16, 64, 512)
CACHE_BYTES = 96 * 2**20
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; seconds."""

    name: str
    rows: int
    outer: int
    inner: int
    torch_s: float
    onednn_s: float
    ours_s: float

    def __str__(self) -> str:
        moved = self.outer * self.inner * 2 / self.ours_s / 1e9
        done = 2 * self.rows * self.outer * self.inner / self.ours_s / 1e9
        times = " | ".join(f"{s * 1e6:.0f}" for s in (self.torch_s, self.onednn_s, self.ours_s))
        ratio = self.onednn_s / self.ours_s
        return f"| {self.name} | {self.rows} | {times} | {ratio:.2f} | {moved:.1f} | {done:.0f} |"


def fastest(turns: tuple[Callable[[], object], ...]) -> list[float]:
    """Seconds of each, taken in turns."""
    best = [float("inf")] * len(turns)
    for _ in range(ROUNDS):
        for index, turn in enumerate(turns):
            start = time.perf_counter()
            turn()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def measure(name: str, outer: int, inner: int) -> Iterator[Row]:
    """All row counts of one matrix."""
    count = max(1, CACHE_BYTES // (outer * inner * 2))
    dense = [torch.randn(outer, inner).bfloat16() for _ in range(count)]
    onednn = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in dense]
    ours = [torch.ops.antiphon.pack_linear(weight) for weight in dense]

    for rows in ROWS:
        x = torch.randn(rows, inner).bfloat16()
        seconds = fastest(
            (
                partial(each, partial(F.linear, x), dense),
                partial(each, partial(packed, x), onednn),
                partial(each, partial(own, x, outer), ours),
            )
        )
        yield Row(name, rows, outer, inner, *(s / count for s in seconds))


def each(product: Callable[[Tensor], object], weights: list[Tensor]) -> None:
    """Every weight once."""
    for weight in weights:
        product(weight)


def own(x: Tensor, outer: int, weight: Tensor) -> object:
    """The kernel's product."""
    return torch.ops.antiphon.linear(x, weight, outer, None, False)


def packed(x: Tensor, weight: Tensor) -> object:
    """oneDNN's product with its own layout."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    if words := problem():
        raise PreflightError(words)
    emit = sys.stdout.write
    emit("| matrix | rows | F.linear us | oneDNN us | ours us | oneDNN / ours | GB/s | GFLOP/s |\n")
    emit("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n")
    for name, (outer, inner) in MATRICES.items():
        for row in measure(name, outer, inner):
            emit(f"{row}\n")


if __name__ == "__main__":
    main()
