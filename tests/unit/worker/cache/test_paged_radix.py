"""RadixTree with pages of several tokens, against a dictionary of every cached path."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.cache import siblings
from worker.cache.node import Node
from worker.cache.radix import RadixTree
from worker.cache.siblings import LOOKED_AT

Path = tuple[str, tuple[int, ...]]  # salt, tokens: whole pages, but for a tail
STEM = tuple(i * i % 5 % 2 for i in range(40))
PROMPTS = st.tuples(
    st.sampled_from(["", "", "mine"]),
    st.builds(
        lambda stem, own: (*STEM[:stem], *own),
        st.integers(0, len(STEM)),
        st.lists(st.integers(0, 1), max_size=6),
    ),
)


def ids(numbers) -> np.ndarray:
    return np.array(numbers, np.int32)


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class PagedMachine(RuleBasedStateMachine):
    """``page`` has the first slot of the last page of each path, a tail's too."""

    @initialize(size=st.sampled_from([1, 4, 16]))
    def build(self, size: int) -> None:
        self.size, self.tree = size, RadixTree(size)
        self.page: dict[Path, int] = {}
        self.locked: list[tuple[Node, Path]] = []
        self.made = 0
        self.all = patch.object(siblings, "LOOKED_AT", 1000)
        self.all.start()

    def teardown(self) -> None:
        if hasattr(self, "all"):
            self.all.stop()

    def take(self, pages: int) -> np.ndarray:
        """Slots of fresh pages."""
        first, self.made = self.made, self.made + pages
        return np.arange(first * self.size, self.made * self.size, dtype=np.int32)

    def whole(self, path: Path) -> list[Path]:
        salt, tokens = path
        return [(salt, tokens[:n]) for n in range(self.size, len(tokens) + 1, self.size)]

    def slots(self, path: Path) -> list[int]:
        return [self.page[p] + i for p in self.whole(path) for i in range(self.size)]

    def known(self, path: Path) -> Path:
        """The longest cached prefix, in whole pages."""
        return ([(path[0], ()), *(p for p in self.whole(path) if p in self.page)])[-1]

    def longest(self, path: Path) -> int:
        """Of the longest cached prefix, token by token."""
        return max((shared(p[1], path[1]) for p in self.page if p[0] == path[0]), default=0)

    def insert(self, path: Path) -> tuple[Node, Path]:
        salt, tokens = path
        tokens = tokens[: len(tokens) // self.size * self.size]
        mine = self.take(len(tokens) // self.size)
        node, held = self.tree.insert(ids(tokens), mine, salt)
        for n, prefix in enumerate(self.whole((salt, tokens))):
            self.page.setdefault(prefix, int(mine[n * self.size]))
        assert held.tolist() == self.slots((salt, tokens))
        return node, (salt, tokens)

    @rule(path=PROMPTS)
    def store(self, path: Path) -> None:
        self.insert(path)

    @rule(path=PROMPTS)
    def store_all(self, path: Path) -> None:
        """With its last page, which may not be full."""
        node, (salt, tokens) = self.insert(path)
        if tail := path[1][len(tokens) :]:
            page, longest = self.take(1), self.longest(path)
            leaf = self.tree.keep(node, ids(tail), page, salt)
            assert (leaf is None) == (longest == len(path[1]))
            if leaf is not None:
                self.page[path] = int(page[0])

    @rule(path=PROMPTS, lock=st.booleans())
    def match(self, path: Path, lock: bool) -> None:
        salt, tokens = path
        known, longest = self.known(path), self.longest(path)
        assert self.tree.peek(ids(tokens), salt) == longest
        assert self.tree.locate(ids(tokens), salt)[2] == len(known[1])
        found = self.tree.match(ids(tokens), salt)
        assert found.slots.tolist() == self.slots(known)
        assert (found.boundary is None) == (longest == len(known[1]))
        if found.boundary is not None:
            more = longest - len(known[1])
            assert 0 < more < self.size
            sources = [
                [first + i for i in range(more)]
                for p, first in self.page.items()
                if p[0] == salt and p[1][:longest] == tokens[:longest]
                if len(p[1]) <= len(known[1]) + self.size
            ]
            assert found.boundary.slots.tolist() in sources
        if lock:
            node = found.boundary.node if found.boundary is not None else found.node
            self.tree.lock(node)
            self.locked.append((node, self.path_of(node)))

    def path_of(self, node: Node) -> Path:
        pieces: list[int] = []
        step: Node | None = node
        while step is not None:
            pieces[:0] = step.tokens.tolist()
            step = step.parent
        return node.salt, tuple(pieces)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)

    @rule(count=st.integers(0, 40))
    def evict(self, count: int) -> None:
        protected = {p for _, path in self.locked for p in [*self.whole(path), path]}
        free = {p: first for p, first in self.page.items() if p not in protected}
        freed = self.tree.evict(count)
        pages = freed.reshape(-1, self.size)
        assert (pages == pages[:, :1] + np.arange(self.size)).all()
        gone = set(pages[:, 0].tolist())
        assert gone <= set(free.values())
        assert len(gone) == min(-(-count // self.size), len(free))
        self.page = {p: first for p, first in self.page.items() if first not in gone}
        for path in self.page:
            assert all(p in self.page for p in self.whole(path)), "a page lost the one before it"

    @invariant()
    def tree_agrees(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()
            assert self.tree.tokens == len(self.page) * self.size


PagedMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPagedRadix = PagedMachine.TestCase


def tree_of(*paths: list[int]) -> RadixTree:
    """Pages of four; each path with its last page, which may not be full."""
    tree, first = RadixTree(4), 0
    for path in paths:
        whole = len(path) // 4 * 4
        slots = np.arange(first, first + whole + 4, dtype=np.int32)
        first += whole + 4
        node, _ = tree.insert(ids(path[:whole]), slots[:whole])
        if path[whole:]:
            tree.keep(node, ids(path[whole:]), slots[whole:])
    tree.check()
    return tree


def test_nodes_split_between_pages_and_the_rest_is_the_boundary():
    tree = tree_of([1, 2, 3, 4, 5, 6, 7, 8])
    found = tree.match(ids([1, 2, 3, 4, 5, 6, 9, 9]))
    assert found.slots.tolist() == [0, 1, 2, 3]
    assert found.node.tokens.tolist() == [1, 2, 3, 4]
    assert found.boundary is not None
    assert found.boundary.slots.tolist() == [4, 5]
    assert tree.match(ids([1, 2, 9])).boundary.slots.tolist() == [0, 1]
    tree.check()


def test_a_tail_is_found_token_by_token_and_is_nobodys_parent():
    tree = tree_of([1, 2, 3, 4, 5, 6, 7])
    assert tree.peek(ids([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 7
    assert tree.peek(ids([1, 2, 3, 4, 5, 6])) == 6
    found = tree.match(ids([1, 2, 3, 4, 5, 6, 7]))
    assert (found.length, found.boundary.slots.tolist()) == (4, [4, 5, 6])
    assert tree.tokens == 8


def test_a_tail_that_is_known_already_stays_the_callers():
    tree = tree_of([1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8])
    node = tree.match(ids([1, 2, 3, 4])).node
    page = np.arange(40, 44, dtype=np.int32)
    for known in ([5], [5, 6], [5, 6, 7]):
        assert tree.keep(node, ids(known), page) is None
    assert tree.keep(tree.root, ids([5, 6]), page) is None
    assert tree.keep(node, ids([5, 7]), page) is not None


def test_a_tail_that_a_longer_one_covers_goes_first():
    tree = tree_of([1, 1], [2, 2, 2, 2])
    tree.match(ids([1, 1]))  # the youngest
    node, _ = tree.insert(ids([1, 1, 1, 1]), np.arange(40, 44, dtype=np.int32))
    assert tree.evict(1).tolist() == [0, 1, 2, 3]
    assert node.parent is tree.root


def test_a_locked_tail_is_not_evicted():
    tree = tree_of([1, 1])
    found = tree.match(ids([1, 1]))
    tree.lock(found.boundary.node)
    tree.insert(ids([1, 1, 1, 1]), np.arange(40, 44, dtype=np.int32))
    assert tree.evict(8).tolist() == [40, 41, 42, 43]
    tree.unlock(found.boundary.node)
    assert tree.evict(8).tolist() == [0, 1, 2, 3]


def test_what_was_copied_from_is_as_young_as_its_match():
    tree = tree_of([1, 1], [2, 2], [3, 3])
    tree.match(ids([1, 9]))
    assert tree.evict(8).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_of_very_many_that_begin_alike_the_latest_are_looked_at():
    tree = RadixTree(4)
    for n in range(3 * LOOKED_AT):
        slots = np.arange(4 * n, 4 * n + 4, dtype=np.int32)
        tree.insert(ids([1, 2, 100 + n, 0]), slots)
    assert tree.peek(ids([1, 2, 100 + 3 * LOOKED_AT - 1, 9])) == 3
    assert tree.peek(ids([1, 2, 100, 9])) == 2  # too long ago
    assert tree.match(ids([1, 2, 100, 0])).length == 4  # a whole page is found all the same
    assert tree.peek(ids([1, 2, 100, 9])) == 3


@pytest.mark.parametrize("size", [4, 16])
def test_insert_takes_whole_pages_only(size):
    with pytest.raises(AssertionError):
        RadixTree(size).insert(ids([1, 2, 3]), ids([0, 1, 2]))
