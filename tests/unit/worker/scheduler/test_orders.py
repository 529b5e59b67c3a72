"""Who starts first: priority, retracted sequences, and the three orders."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import UnknownBackend
from tests.support.requests import request
from worker.cache.radix import RadixTree
from worker.scheduler.orders import PATIENCE_S
from worker.scheduler.waiting import ORDERS, WaitingQueue
from worker.sequence import Sequence

CONTEXT = 100


def sequence(rid: str, ids: list[int], priority: int = 0) -> Sequence:
    return Sequence.of(request(rid, ids, 1, priority=priority), "router", CONTEXT)


def cached(*paths: list[int]) -> RadixTree:
    tree = RadixTree()
    for start, path in enumerate(paths):
        slots = np.arange(start * CONTEXT, start * CONTEXT + len(path), dtype=np.int32)
        tree.insert(np.array(path, np.int32), slots)
    return tree


def queue(schedule: str, tree: RadixTree) -> WaitingQueue:
    return WaitingQueue(ORDERS.load(schedule)(tree, CONTEXT))


def order(waiting: WaitingQueue, now: float = 0.0) -> str:
    waiting.arrange(now)
    return "".join(one.rid for one in waiting)


@pytest.mark.parametrize("schedule", list(ORDERS))
def test_priority_first_then_what_was_retracted_then_the_order(schedule):
    waiting = queue(schedule, cached())
    for rid, priority in zip("abcd", (0, 1, 0, -1), strict=True):
        waiting.push(sequence(rid, [1, 2], priority))
    waiting.push_front(sequence("x", [1, 2]))
    waiting.push_front(sequence("y", [1, 2]))
    assert order(waiting) == "byxacd"


@pytest.mark.parametrize("schedule", list(ORDERS))
def test_what_leaves_and_comes_back_is_there_once(schedule):
    waiting = queue(schedule, cached([1, 2, 3]))
    one, two = sequence("a", [1, 2]), sequence("b", [1, 2])
    waiting.push(one)
    waiting.push(two)
    waiting.remove(one)  # before anybody saw it
    waiting.push(one)
    assert order(waiting) == "ba"
    waiting.remove(two)
    assert (order(waiting), len(waiting), waiting.tokens) == ("a", 1, 2)
    waiting.push_front(two)
    assert order(waiting) == "ba"
    for each in waiting:  # removing while iterating is allowed
        waiting.remove(each)
    assert (order(waiting), len(waiting), waiting.tokens) == ("", 0, 0)


def test_an_unknown_order_is_refused_by_name():
    with pytest.raises(UnknownBackend, match="lpm"):
        ORDERS.load("random")


def test_longest_cached_prefix_first():
    waiting = queue("lpm", cached([1, 2, 3, 4], [5, 6]))
    for rid, ids in (("a", [9, 9]), ("b", [5, 6, 7]), ("c", [1, 2, 3, 9]), ("d", [5, 6, 8])):
        waiting.push(sequence(rid, ids))
    assert order(waiting) == "cbda"


def test_longest_prefix_follows_the_tree():
    tree = cached([1, 2])
    waiting = queue("lpm", tree)
    waiting.push(sequence("a", [1, 2, 9]))
    waiting.push(sequence("b", [5, 6, 7, 9]))
    assert order(waiting) == "ab"
    tree.insert(np.array([5, 6, 7], np.int32), np.array([50, 51, 52], np.int32))
    assert order(waiting) == "ba"
    tree.evict(4)  # [1, 2], and of [5, 6, 7] the tail
    assert order(waiting) == "ba"
    tree.evict(1)
    assert order(waiting) == "ab"


def test_longest_prefix_ages():
    """A cached token is worth PATIENCE_S / CONTEXT of waiting."""
    waiting = queue("lpm", cached(list(range(50))))
    waiting.push(sequence("a", [99, 99]))
    order(waiting, 0.0)
    for rid, later in (("b", 0.49), ("c", 0.51)):
        waiting.push(sequence(rid, [*range(50), 99]))
        order(waiting, later * PATIENCE_S)
    assert order(waiting, PATIENCE_S) == "bac"


def test_the_heaviest_subtree_goes_first_and_longer_matches_before_shorter_ones():
    waiting = queue("dfs_weight", cached([1, 2, 3], [1, 2, 4], [5, 6, 7]))
    prompts = {
        "a": [9, 9],  # cached nowhere
        "b": [5, 6, 7, 9],
        "c": [5, 6, 7, 8],
        "d": [1, 2, 3, 9],
        "e": [1, 2, 4, 9],
        "f": [1, 2, 4, 8],
        "g": [1, 2, 9],
    }
    for rid, ids in prompts.items():
        waiting.push(sequence(rid, ids))
    assert order(waiting) == "efdgbca"


def test_who_has_waited_long_goes_before_any_subtree():
    waiting = queue("dfs_weight", cached([1, 2, 3]))
    waiting.push(sequence("a", [9, 9]))
    order(waiting, 0.0)
    waiting.push(sequence("b", [1, 2, 3, 9]))
    assert order(waiting, 1.0) == "ba"
    assert order(waiting, PATIENCE_S) == "ab"
