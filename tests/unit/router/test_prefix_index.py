"""The prefix index against a model that keeps every block of every rank by itself."""

from __future__ import annotations

import tracemalloc
from array import array
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from core.block_hash import BLOCK_TOKENS, block_hashes
from router.prefix_index import PrefixIndex, QueuedPrefix
from tests.support.wires import incarnation

Path = tuple[int, ...]


def chained(path: Path) -> array[int]:
    """Any hash will do that covers all before it."""
    return array("Q", (hash(path[: i + 1]) % 2**64 for i in range(len(path))))


class Block:
    def __init__(self) -> None:
        self.used = 0
        self.pins = 0
        self.sure = False


class Naive:
    """One rank, one block at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[Path, Block] = {}

    def cover(self, path: Path) -> list[Block]:
        steps = [path[: i + 1] for i in range(len(path))]
        return [self.blocks.setdefault(step, Block()) for step in steps]

    def match(self, path: Path) -> int:
        return max(i for i in range(len(path) + 1) if not i or path[:i] in self.blocks)

    def insert(self, path: Path, now: int) -> None:
        for block in self.cover(path):
            block.sure = True
            if not block.pins:
                block.used = now
        self.evict()

    def pin(self, path: Path) -> None:
        for block in self.cover(path):
            block.pins += 1

    def unpin(self, path: Path, now: int, *, computed: bool) -> None:
        for block in self.cover(path):
            block.pins -= 1
            block.sure |= computed
            if not block.pins:
                block.used = now
        unsure = [p for p, b in self.blocks.items() if not b.pins and not b.sure]
        for path_of in unsure:
            del self.blocks[path_of]
        self.evict()

    def evict(self) -> None:
        free = [(b.used, -len(p), p) for p, b in self.blocks.items() if not b.pins]
        for _, _, path in sorted(free)[: max(0, len(free) - self.capacity)]:
            del self.blocks[path]


paths = st.lists(st.integers(0, 1), min_size=0, max_size=7).map(tuple)
operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "pin", "pin", "computed", "cancel", "forget"]),
        st.integers(0, 2),
        paths,
        st.integers(0, 100),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(operations, st.integers(0, 12))
def test_the_index_is_what_single_blocks_would_be(todo, capacity):
    index, times = PrefixIndex(), count(1)
    lives = [incarnation(replica=n) for n in range(3)]
    naive = [Naive(capacity) for _ in lives]
    pinned: list[list[Path]] = [[] for _ in lives]
    for what, rank, path, choice in todo:
        shelf, now = index.shelf(lives[rank], capacity), next(times)
        if what == "insert":
            index.insert(shelf, chained(path), now)
            naive[rank].insert(path, now)
        elif what == "pin":
            index.pin(shelf, chained(path))
            naive[rank].pin(path)
            pinned[rank].append(path)
        elif what == "forget":
            index.forget(lives[rank])
            naive[rank], pinned[rank] = Naive(capacity), []
        elif pinned[rank]:
            old = pinned[rank].pop(choice % len(pinned[rank]))
            (index.confirm if what == "computed" else index.cancel)(shelf, chained(old), now)
            naive[rank].unpin(old, now, computed=what == "computed")
        index.check()
        for query in {path, path[:3], (*path, 0), (*path, 1, 1)}:
            found = index.match(chained(query))
            ours = [found.get(index.shelf(life, capacity), 0) for life in lives]
            assert ours == [model.match(query) for model in naive]
    for life in lives:
        index.forget(life)
    index.check()
    assert index.match(chained((0,))) == index.match(chained((1,))) == {}


def test_all_holders_are_found_each_with_its_own_length():
    index = PrefixIndex()
    a, b, c = (index.shelf(incarnation(replica=n), 100) for n in range(3))
    index.insert(a, chained((1, 2, 3, 4)), 0.0)
    index.insert(b, chained((1, 2)), 0.0)
    index.insert(c, chained((9,)), 0.0)
    assert index.match(chained((1, 2, 3, 5))) == {a: 3, b: 2}


def test_a_queued_prefix_costs_no_capacity_and_is_not_evicted():
    index = PrefixIndex()
    shelf = index.shelf(incarnation(), 4)
    queued = QueuedPrefix(index, shelf, chained((1, 2, 3)))
    index.insert(shelf, chained((5, 6, 7, 8)), 1.0)
    assert index.match(chained((1, 2, 3))) == index.match(chained((5, 6, 7))) == {shelf: 3}
    queued.computed(2.0)
    assert index.match(chained((1, 2, 3))) == {shelf: 3}
    assert index.match(chained((5, 6, 7, 8))) == {shelf: 1}
    index.check()


def test_the_output_is_added_at_the_end():
    index = PrefixIndex()
    shelf = index.shelf(incarnation(), 100)
    ids = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    queued = QueuedPrefix(index, shelf, block_hashes(ids[: 2 * BLOCK_TOKENS]))
    queued.computed(1.0)
    queued.ended(ids, 2.0)
    assert index.match(block_hashes(ids)) == {shelf: 4}


@pytest.mark.parametrize("prompt_tokens", [3, 2 * BLOCK_TOKENS])
def test_a_salted_request_leaves_its_output_under_its_salt(prompt_tokens):
    index = PrefixIndex()
    shelf = index.shelf(incarnation(), 100)
    ids = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    queued = QueuedPrefix(index, shelf, block_hashes(ids[:prompt_tokens], "mine"), "mine")
    queued.computed(1.0)
    queued.ended(ids, 2.0)
    assert index.match(block_hashes(ids, "mine")) == {shelf: 4}
    assert index.match(block_hashes(ids)) == index.match(block_hashes(ids, "other")) == {}


def test_a_request_that_never_ran_leaves_what_was_there_before():
    index = PrefixIndex()
    shelf = index.shelf(incarnation(), 100)
    index.insert(shelf, chained((1, 2)), 1.0)
    QueuedPrefix(index, shelf, chained((1, 2, 3))).ended(None, 2.0)
    assert index.match(chained((1, 2, 3))) == {shelf: 2}
    index.check()


def test_a_request_may_outlive_its_rank():
    index = PrefixIndex()
    life = incarnation()
    queued = [QueuedPrefix(index, index.shelf(life, 9), chained((1, 2))) for _ in range(2)]
    index.forget(life)
    queued[0].computed(1.0)
    queued[0].ended(np.arange(64, dtype=np.int32), 1.0)
    queued[1].ended(None, 1.0)
    assert index.match(chained((1, 2))) == {}
    index.check()


def test_memory_of_a_prompt_of_two_kilobytes():
    """About 500 tokens; other routers' trees take 5 kB."""
    index = PrefixIndex()
    shelf = index.shelf(incarnation(), 10**9)
    draw = np.random.default_rng(0)
    prompts = [block_hashes(draw.integers(0, 50_000, 512)) for _ in range(1000)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for now, hashes in enumerate(prompts):
        index.insert(shelf, hashes, float(now))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / len(prompts) < 1000
