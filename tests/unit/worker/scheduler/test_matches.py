"""Kept matches are what a fresh look would find, whatever happens to the tree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from tests.support.requests import request
from worker.cache.radix import RadixTree
from worker.scheduler.matches import Matches
from worker.sequence import Sequence

ids = st.lists(st.integers(0, 2), min_size=1, max_size=8)
salt = st.sampled_from(["", "mine"])
change = st.one_of(
    st.tuples(st.just("wait"), ids, salt),
    st.tuples(st.just("insert"), ids, salt),
    st.tuples(st.just("match"), ids, salt),  # splits nodes
    st.tuples(st.just("lock"), ids, salt),
    st.tuples(st.just("evict"), st.integers(1, 5), salt),
    st.tuples(st.just("leave"), st.integers(0, 100), salt),
)


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(change, min_size=5, max_size=40))
def test_kept_matches_equal_fresh_ones(changes):
    tree, slot, waiting = RadixTree(), 0, []
    matches = Matches(tree)
    seen: dict[Sequence, int] = {}
    for kind, what, salted in changes:
        if kind == "wait":
            one = Sequence.of(request("r", what, 1, salt=salted), "router", 20)
            waiting.append(one)
            matches.add(one)
        elif kind == "leave" and waiting:
            gone = waiting.pop(what % len(waiting))
            matches.remove(gone)
            seen.pop(gone, None)
        elif kind == "evict":
            tree.evict(what)
        elif kind == "insert":
            slots = np.arange(slot, slot + len(what), dtype=np.int32)
            slot += len(what)
            tree.insert(np.array(what, np.int32), slots, salted)
        elif kind in ("match", "lock"):
            found = tree.match(np.array(what, np.int32), salted)
            if kind == "lock":
                tree.lock(found.node)
        moved = set(matches.moved())
        fresh = {s: tree.peek(s.ids[: s.reusable_len], s.salt) for s in waiting}
        assert {s: matches.length(s) for s in waiting} == fresh
        assert {s for s in waiting if seen.get(s) != fresh[s]} <= moved
        assert sum(matches.nodes().values()) == len(waiting)
        assert sorted(map(id, (s for n in matches.nodes() for s in matches.at(n)))) == sorted(
            map(id, waiting)
        )
        seen = fresh
        tree.check()


def test_a_child_below_the_end_of_a_node_is_none_of_those_who_end_inside_it():
    tree = RadixTree()
    tree.insert(np.array([5, 5, 5], np.int32), np.arange(3, dtype=np.int32))
    matches = Matches(tree)
    one = Sequence.of(request("r", [5, 1, 1], 1), "router", 20)
    matches.add(one)
    tree.insert(np.array([5, 5, 5, 1], np.int32), np.arange(4, dtype=np.int32))
    assert matches.length(one) == 1
