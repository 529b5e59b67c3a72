"""RadixTree against a dictionary that has every cached prefix, with its salt, as a key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.cache.node import Node, common_prefix
from worker.cache.radix import RadixTree

Prefix = tuple[str, tuple[int, ...]]  # salt, tokens
TOKENS = st.lists(st.integers(0, 2), max_size=9).map(tuple)
PROMPTS = st.tuples(st.sampled_from(["", "mine", "other"]), TOKENS)


def ids(numbers: tuple[int, ...] | list[int]) -> np.ndarray:
    return np.array(numbers, np.int32)


def prefixes(path: Prefix) -> list[Prefix]:
    salt, tokens = path
    return [(salt, tokens[:n]) for n in range(1, len(tokens) + 1)]


class RadixMachine(RuleBasedStateMachine):
    """A prefix is as old as the last access to it, or as the last unlock that set it free."""

    @initialize()
    def build(self) -> None:
        self.tree = RadixTree()
        self.slot: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locked: list[tuple[Node, Prefix]] = []
        self.slots_made = self.now = 0

    def protected(self) -> set[Prefix]:
        return {p for _, path in self.locked for p in prefixes(path)}

    def known(self, path: Prefix) -> Prefix:
        """The longest cached prefix of ``path``."""
        return ([(path[0], ()), *(p for p in prefixes(path) if p in self.slot)])[-1]

    def touch(self, path: Prefix) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(prefixes(path), self.now))

    @rule(path=PROMPTS)
    def insert(self, path: Prefix) -> None:
        salt, tokens = path
        mine = list(range(self.slots_made, self.slots_made + len(tokens)))
        self.slots_made += len(tokens)
        known, version = self.known(path), self.tree.version
        node, held = self.tree.insert(ids(tokens), ids(mine), salt)
        for prefix, slot in zip(prefixes(path), mine, strict=True):
            self.slot.setdefault(prefix, slot)
        self.touch(path)
        assert held.tolist() == [self.slot[p] for p in prefixes(path)]
        assert self.tree.match(ids(tokens), salt).node is node
        if known != path:
            assert self.tree.version > version

    @rule(path=PROMPTS, lock=st.booleans())
    def match(self, path: Prefix, lock: bool) -> None:
        salt, tokens = path
        known = self.known(path)
        assert self.tree.peek(ids(tokens), salt) == len(known[1])
        found = self.tree.match(ids(tokens), salt)
        self.touch(known)
        assert found.length == len(known[1])
        assert found.slots.tolist() == [self.slot[p] for p in prefixes(known)]
        version = self.tree.version
        self.tree.match(ids(tokens), salt)
        assert self.tree.version == version
        if lock:
            self.tree.lock(found.node)
            self.locked.append((found.node, known))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, path = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)
        self.now += 1
        freed = set(prefixes(path)) - self.protected()
        self.used.update(dict.fromkeys(freed, self.now))

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        order = sorted(
            self.slot.keys() - self.protected(),
            key=lambda prefix: (self.used[prefix], -len(prefix[1])),
        )
        version = self.tree.version
        freed = self.tree.evict(count).tolist()
        assert sorted(freed) == sorted(self.slot.pop(prefix) for prefix in order[:count])
        assert (self.tree.version > version) == bool(freed)

    @invariant()
    def tree_agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        assert self.tree.tokens == len(self.slot)
        assert self.tree.evictable == len(self.slot.keys() - self.protected())


RadixMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRadix = RadixMachine.TestCase


@pytest.mark.parametrize(
    ("a", "b", "shared"), [([], [1], 0), ([1], [2], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1)]
)
def test_common_prefix(a, b, shared):
    assert common_prefix(ids(a), ids(b)) == shared
    assert common_prefix(ids(b), ids(a)) == shared


def test_a_match_that_ends_inside_a_node_splits_it():
    tree = RadixTree()
    tree.insert(ids([1, 2, 3, 4]), ids([10, 11, 12, 13]))
    found = tree.match(ids([1, 2, 9]))
    assert found.slots.tolist() == [10, 11]
    assert found.node.tokens.tolist() == [1, 2]
    assert tree.match(ids([1, 2, 3, 4])).slots.tolist() == [10, 11, 12, 13]


def test_the_tree_keeps_its_own_slots_for_what_it_has():
    tree = RadixTree()
    tree.insert(ids([1, 2]), ids([10, 11]))
    _, held = tree.insert(ids([1, 2, 3]), ids([20, 21, 22]))
    assert held.tolist() == [10, 11, 22]


def test_eviction_takes_the_oldest_leaf_and_of_a_long_one_only_the_tail():
    tree = RadixTree()
    tree.insert(ids([1, 2, 3, 4]), ids([0, 1, 2, 3]))
    tree.insert(ids([7, 8]), ids([4, 5]))
    tree.match(ids([1, 2, 3, 4]))
    assert tree.evict(3).tolist() == [4, 5, 3]
    assert tree.match(ids([1, 2, 3, 4])).length == 3


def test_what_is_locked_is_never_evicted():
    tree = RadixTree()
    node, _ = tree.insert(ids([1, 2]), ids([0, 1]))
    tree.insert(ids([1, 2, 3]), ids([0, 1, 2]))
    tree.lock(node)
    assert tree.evict(100).tolist() == [2]
    tree.unlock(node)
    assert tree.evict(100).tolist() == [0, 1]


def test_one_unlock_too_many_is_a_defect():
    tree = RadixTree()
    node, _ = tree.insert(ids([1]), ids([0]))
    with pytest.raises(AssertionError, match="unlocked more often"):
        tree.unlock(node)


def test_paths_of_different_salts_share_nothing_but_the_age():
    tree = RadixTree()
    tree.insert(ids([1, 2, 3]), ids([0, 1, 2]), "mine")
    assert tree.match(ids([1, 2, 3])).length == tree.peek(ids([1, 2, 3]), "other") == 0
    _, held = tree.insert(ids([1, 2, 3]), ids([3, 4, 5]), "other")
    assert held.tolist() == [3, 4, 5]
    assert tree.match(ids([1, 2, 9]), "mine").slots.tolist() == [0, 1]
    tree.check()
    assert tree.evict(4).tolist() == [2, 3, 4, 5]
    assert not tree.match(ids([1, 2, 3]), "other").length
    tree.evict(2)
    assert not tree.root.children, "a salt leaves nothing behind"


def test_the_tree_does_not_pin_the_callers_arrays():
    tree = RadixTree()
    path, slots = ids([1, 2, 3]), ids([4, 5, 6])
    tree.insert(path, slots)
    path[:], slots[:] = 9, 9
    assert tree.match(ids([1, 2, 3])).slots.tolist() == [4, 5, 6]
