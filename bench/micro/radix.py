"""What the radix tree costs when it is large.

``python -m bench.micro.radix [--nodes 100000] [--page-size 1]``

The tree holds conversations: a system prompt that many share, then turns, a node for each. Prints
a Markdown table of microseconds for one operation on a conversation drawn at random.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

import numpy as np

from bench.micro.timing import Times, load_line
from core.wire import Int32Array
from worker.cache.radix import RadixTree

SYSTEM, SYSTEMS = 128, 100  # tokens of a system prompt, and how many there are
TURN, TURNS = 64, 8  # tokens of a turn, turns of a conversation
VOCAB = 49_152
MANY = 64  # turns evicted at once, to make room for a long prompt


class Conversations:
    """A tree with about ``nodes`` nodes, and operations on it."""

    def __init__(self, nodes: int, page_size: int = 1) -> None:
        self.tree = RadixTree(page_size)
        self._draw, self._random = Random(1), np.random.default_rng(1)
        systems = [self._tokens(SYSTEM) for _ in range(SYSTEMS)]
        self._all = [
            np.concatenate([self._draw.choice(systems), self._tokens(TURN * TURNS)])
            for _ in range(nodes // TURNS)
        ]
        for turn in range(1, TURNS + 1):  # as they would come: everybody's first turns first
            for ids in self._all:
                self._insert(ids[: SYSTEM + turn * TURN])

    def operations(self) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
        """Names, and what prepares one operation: preparing is not measured."""
        tree = self.tree
        whole = SYSTEM + TURN * TURNS
        yield f"peek, all {whole} tokens known", lambda: self._ready(tree.peek, self._known())
        yield f"match, all {whole} tokens known", lambda: self._ready(tree.match, self._known())
        yield "match, nothing known", lambda: self._ready(tree.match, self._tokens(whole))
        yield (
            "match that splits a turn",
            lambda: self._ready(tree.match, self._known()[: -TURN // 2]),
        )
        yield "lock and unlock a path", self._lock
        yield "insert one more turn", lambda: self._ready(self._insert, self._longer())
        yield "insert a new conversation", lambda: self._ready(self._insert, self._tokens(whole))
        yield "evict one turn", lambda: self._ready(tree.evict, TURN)
        yield f"evict {MANY} turns", lambda: self._ready(tree.evict, MANY * TURN)

    def _lock(self) -> Callable[[], object]:
        node = self.tree.match(self._known()).node

        def run() -> None:
            self.tree.lock(node)
            self.tree.unlock(node)

        return run

    def _known(self) -> Int32Array:
        return self._draw.choice(self._all)

    def _longer(self) -> Int32Array:
        return np.concatenate([self._known(), self._tokens(TURN)])

    def _tokens(self, count: int) -> Int32Array:
        return self._random.integers(VOCAB, size=count, dtype=np.int32)

    def _insert(self, ids: Int32Array) -> None:
        self.tree.insert(ids, np.arange(len(ids), dtype=np.int32))

    @staticmethod
    def _ready(run: Callable[..., object], *args: object) -> Callable[[], object]:
        return lambda: run(*args)


def table(nodes: int, repeats: int, page_size: int = 1) -> Iterator[str]:
    """The lines of the table."""
    began = load_line()
    conversations = Conversations(nodes, page_size)
    count = sum(1 for _ in conversations.tree.nodes())
    yield f"{count:,} nodes, {conversations.tree.tokens:,} tokens; µs an operation. {began}\n"
    yield "| operation | least | quartile | median |\n|---|---:|---:|---:|"
    gc.collect()
    gc.freeze()
    gc.disable()  # as the step loop does
    for name, prepare in conversations.operations():
        seconds = []
        for _ in range(repeats):
            run = prepare()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        yield f"| {name} | {Times.of(seconds).cells(1e-6)} |"
    gc.enable()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.micro.radix")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=300)
    # whole turns
    parser.add_argument("--page-size", type=int, default=1, choices=(1, 2, 4, 8, 16, 32, 64))
    given = parser.parse_args(argv)
    for line in table(given.nodes, given.repeats, given.page_size):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
