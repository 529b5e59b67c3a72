"""In how many pieces does a prompt's KV lie? The real radix tree and allocator under traffic.

    python -m bench.micro.fragmentation [--pages 46000] [--requests 700] [--seeds 2]

A transport copies a prompt run by run, so what counts is how many runs of consecutive pages a
prompt has that comes to a pool which has been full for long. "exact" evicts no page that is not
needed at once, as the simplest cache would; all else is the same. The traffic: bench.micro.churn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from bench.micro.churn import Churn
from core.wire import Int32Array, Role
from worker.cache.prefix_cache import PrefixCache

WARM = 250  # requests until the pool has been turned over a few times


class ExactCache(PrefixCache):
    """Evicts what is missing and no more."""

    def _allocate(self, count: int, after: int) -> Int32Array | None:
        if self.slots.free < count <= self.available:
            self.slots.release(self.tree.evict(count - self.slots.free))
        return self.slots.allocate(count, after)


CACHES = {"here": PrefixCache, "exact": ExactCache}


def runs(slots: Int32Array) -> list[int]:
    """Lengths of the stretches of consecutive slots."""
    ends = np.flatnonzero(np.diff(slots) != 1)
    lengths: list[int] = np.diff(np.concatenate(([-1], ends, [len(slots) - 1]))).tolist()
    return lengths


def row(name: str, role: Role, pages: int, requests: int, seeds: int) -> str:
    """One line of the table, over several seeds."""
    each: list[list[int]] = []
    for seed in range(seeds):
        churn = Churn(role, pages, seed=seed, cache=CACHES[name])
        churn.serve(WARM)
        each += [runs(slots) for slots in churn.serve(requests) if len(slots)]
    counts, lengths = [len(one) for one in each], [n for one in each for n in one]
    return (
        f"| {role.value}, {name} | {np.mean(counts):.1f} | {np.median(counts):.0f}"
        f" | {np.percentile(counts, 95):.0f} | {np.mean(lengths):.0f}"
        f" | {np.percentile(lengths, 10):.0f} |"
    )


def main(words: Sequence[str]) -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--pages", type=int, default=46_000, help="1 GiB of SmolLM2-135M")
    parser.add_argument("--requests", type=int, default=700)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(words)
    print(
        "| rank, cache | runs a prompt | p50 | p95 | slots a run | p10 |\n| --- "
        + "| ---: " * 5
        + "|"
    )
    for role in (Role.PREFILL, Role.DECODE):
        for name in CACHES:
            line = row(name, role, options.pages, options.requests, options.seeds)
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
