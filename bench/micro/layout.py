"""What does attention pay for a pool with several layers of a token side by side?

    python -m bench.micro.layout [--rounds 25]

The CPU backend over the pool as it is, over one with all layers side by side, and over one with a
tensor for each layer, the measure of both. Decode rows of SmolLM2, in a pool in runs of 64 slots in
random order and in one without any order. Turns alternate at random; of each the lower quartile.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from statistics import quantiles

import torch
from torch import Tensor

from bench.micro.attention import SMOLLM
from core.clock import RealClock
from worker.attention.base import AttentionBackend
from worker.attention.registry import ATTENTION
from worker.cache.kv_pool import KVPool
from worker.pack import ForwardInput

SLOTS, LAYERS = 8192, 30
SHAPES = ((1, 320), (4, 320), (16, 100), (16, 320), (4, 2000))  # rows, keys of each
DTYPE = torch.bfloat16


class LayerPool(KVPool):
    """The same, with a tensor for each layer."""

    def __init__(self) -> None:
        super().__init__(SMOLLM.spec(LAYERS), SLOTS, DTYPE)
        self.k = tuple(each.contiguous() for each in self.k)
        self.v = tuple(each.contiguous() for each in self.v)


class TokenPool(KVPool):
    """The same, with all layers in one block; slots an odd number of cache lines apart."""

    def __init__(self) -> None:
        super().__init__(SMOLLM.spec(LAYERS), SLOTS, DTYPE)
        numbers = self.k[0][0].numel()
        block = torch.zeros(SLOTS, 2 * LAYERS * numbers + 32, dtype=DTYPE)
        rows = block[:, :-32].view(SLOTS, LAYERS, 2, *self.k[0].shape[1:])
        self.k = tuple(rows[:, layer, 0] for layer in range(LAYERS))
        self.v = tuple(rows[:, layer, 1] for layer in range(LAYERS))


def order(run: int) -> Tensor:
    """All slots, in runs of ``run`` in random order."""
    starts = torch.randperm(SLOTS // run) * run
    return (starts[:, None] + torch.arange(run)).flatten()


def step(rows: int, keys: int, slots: Tensor) -> ForwardInput:
    """One decode step of ``rows`` sequences with ``keys`` tokens each."""
    tables = slots[: rows * keys].view(rows, keys)
    return ForwardInput(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.full((rows,), keys - 1),
        write_slots=tables[:, -1].contiguous(),
        query_start=tuple(range(rows + 1)),
        kv_lens=(keys,) * rows,
        slots=tuple(tables),
        logit_rows=torch.arange(rows),
    )


def seconds(backend: AttentionBackend, what: ForwardInput, pool: KVPool) -> Callable[[], float]:
    """Attends in all layers, KV writes included."""
    plan, rows, clock = backend.plan(what), what.positions.shape[0], RealClock()
    q = torch.randn(rows, SMOLLM.heads, SMOLLM.dim).to(DTYPE)
    k = torch.randn(rows, SMOLLM.kv_heads, SMOLLM.dim).to(DTYPE)

    def run() -> float:
        began = clock.now()
        for layer in range(LAYERS):
            backend.mha(plan, layer, q, k, k, pool, SMOLLM.dim**-0.5)
        return clock.now() - began

    return run


def compare(turns: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The lower quartile of each, of turns in random order after one to warm up."""
    took: list[list[float]] = [[] for _ in turns]
    for round_ in range(rounds + 1):
        for index in random.sample(range(len(turns)), len(turns)):
            value = turns[index]()
            if round_:
                took[index].append(value)
    return [quantiles(each)[0] for each in took]


def main(words: Sequence[str]) -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    backend = ATTENTION.load(ATTENTION.resolve("auto"))()
    made = (KVPool(SMOLLM.spec(LAYERS), SLOTS, DTYPE), TokenPool(), LayerPool())
    for pool in made:
        for tensor in pool.k + pool.v:
            tensor.normal_()
    print("| rows x keys, runs of | by layer | five side by side | all side by side |")
    print("| --- " + "| ---: " * 3 + "|")
    with torch.inference_mode():
        for run in (64, 1):
            for rows, keys in SHAPES:
                what = step(rows, keys, order(run))
                turns = [seconds(backend, what, pool) for pool in made]
                ours, whole, layer = compare(turns, options.rounds)
                times = f"{1000 * layer:.2f} ms | {ours / layer:.2f} | {whole / layer:.2f}"
                print(f"| {rows} x {keys}, {run} | {times} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
