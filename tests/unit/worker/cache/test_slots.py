"""SlotAllocator against a plain set of free slots."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.cache.slots import NOWHERE, SlotAllocator


def runs(free: set[int]) -> list[range]:
    """Maximal runs of consecutive numbers, in order."""
    ordered = sorted(free)
    cuts = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1]
    parts = [ordered[a:b] for a, b in pairwise([0, *cuts, len(ordered)])]
    return [range(part[0], part[-1] + 1) for part in parts if part]


class SlotMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(0, 40))
    def build(self, total: int) -> None:
        self.total = total
        self.slots = SlotAllocator(total)
        self.free = set(range(total))

    @rule(count=st.integers(0, 12), after=st.integers(-1, 40) | st.just(NOWHERE))
    def allocate(self, count: int, after: int) -> None:
        got = self.slots.allocate(count, after)
        if count > len(self.free):
            assert got is None
            return
        assert got is not None
        assert got.dtype == np.int32
        taken = got.tolist()
        assert len(set(taken)) == count
        assert set(taken) <= self.free
        behind = range(after + 1, after + 1 + count)
        if set(behind) <= self.free and after not in self.free:
            assert taken == list(behind)
        elif fitting := [run for run in runs(self.free) if len(run) >= max(count, 1)]:
            assert taken == list(min(fitting, key=len)[:count])
        else:
            lengths = sorted(map(len, runs(self.free)), reverse=True)
            fewest = next(n for n in range(len(lengths) + 1) if sum(lengths[:n]) >= count)
            assert len(runs(set(taken))) == fewest
            assert taken == sorted(taken)
        self.free -= set(taken)

    @precondition(lambda self: len(self.free) < self.total)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owned = sorted(set(range(self.total)) - self.free)
        back = data.draw(st.lists(st.sampled_from(owned), unique=True))
        self.slots.release(np.array(back, np.int32))
        self.free |= set(back)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(AssertionError, match="twice"):
            self.slots.release(np.array([slot], np.int32))

    @rule(outside=st.sampled_from([-1, 0]))
    def free_what_never_was(self, outside: int) -> None:
        slot = outside if outside < 0 else self.total
        with pytest.raises(AssertionError):
            self.slots.release(np.array([slot], np.int32))

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "slots"):
            self.slots.check()
            assert self.slots.free == len(self.free)


SlotMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSlots = SlotMachine.TestCase


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_a_hole_that_is_too_small_is_left_for_a_smaller_request():
    slots = SlotAllocator(10)
    slots.allocate(10)
    slots.release(ids(1, 2))
    slots.release(ids(5, 6, 7, 8))
    assert slots.allocate(3).tolist() == [5, 6, 7]
    assert slots.allocate(2).tolist() == [1, 2]


def test_the_smallest_hole_that_fits_is_taken():
    slots = SlotAllocator(12)
    slots.allocate(12)
    slots.release(ids(0, 1, 2, 3))
    slots.release(ids(6, 7))
    assert slots.allocate(2).tolist() == [6, 7]


def test_what_grows_goes_on_behind_itself():
    slots = SlotAllocator(10)
    slots.allocate(10)
    slots.release(ids(1, 2))
    slots.release(ids(5, 6, 7))
    assert slots.allocate(2, after=4).tolist() == [5, 6]  # the hole at 1 would fit better


def test_behind_a_slot_where_too_few_are_free_another_place_is_found():
    slots = SlotAllocator(12)
    slots.allocate(12)
    slots.release(ids(4, 5, 8, 9, 10))
    assert slots.allocate(3, after=3).tolist() == [8, 9, 10]


def test_without_a_long_enough_run_the_longest_are_taken():
    slots = SlotAllocator(12)
    slots.allocate(12)
    slots.release(ids(9, 0, 4, 2, 5, 10, 7))
    assert slots.allocate(4).tolist() == [4, 5, 9, 10]
    assert slots.allocate(3).tolist() == [0, 2, 7]
    assert slots.free == 0


def test_neighbours_that_come_back_apart_are_one_run_again():
    slots = SlotAllocator(6)
    slots.allocate(6)
    for slot in (0, 2, 4, 5, 3, 1):
        slots.release(ids(slot))
        slots.check()
    assert slots.allocate(6).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_slot_named_twice_in_one_release_is_a_double_free():
    slots = SlotAllocator(4)
    slots.allocate(4)
    with pytest.raises(AssertionError, match="twice"):
        slots.release(ids(2, 2))
