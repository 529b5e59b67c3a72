"""SlotAllocator with pages of several slots: the one of single slots, over pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from worker.cache.slots import NOWHERE, SlotAllocator


def members(pages: np.ndarray, size: int) -> list[int]:
    return [page * size + i for page in pages.tolist() for i in range(size)]


@settings(max_examples=100, deadline=None)
@given(
    size=st.sampled_from([1, 4, 16]),
    calls=st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 30), st.randoms()), max_size=25),
)
def test_it_gives_the_pages_that_an_allocator_of_pages_would(size, calls):
    plain, paged = SlotAllocator(30), SlotAllocator(30 * size, size)
    held: list[int] = []
    for count, after, lot in calls:
        behind = after * size + size - 1 if after >= 0 else NOWHERE
        wanted = plain.allocate(count, after if after >= 0 else NOWHERE)
        got = paged.allocate(count * size, behind)
        if wanted is None:
            assert got is None
            back = [held.pop(lot.randrange(len(held))) for _ in range(len(held) // 2)]
            plain.release(np.array(back, np.int32))
            slots = members(np.array(back, np.int32), size)
            lot.shuffle(slots)
            paged.release(np.array(slots, np.int32))
        else:
            assert got is not None
            assert got.tolist() == members(wanted, size)
            held += wanted.tolist()
        assert paged.free == plain.free * size
        paged.check()


def test_a_part_of_a_page_is_neither_given_nor_taken_back():
    slots = SlotAllocator(12, 4)
    slots.allocate(12)
    with pytest.raises(AssertionError, match="whole pages"):
        slots.allocate(3)
    for part in ([4, 5, 6], [2, 3, 4, 5], [4, 5, 6, 8]):
        with pytest.raises(AssertionError, match="page"):
            slots.release(np.array(part, np.int32))
    slots.release(np.array([4, 5, 6, 7], np.int32))
    with pytest.raises(AssertionError, match="twice"):
        slots.release(np.array([4, 5, 6, 7], np.int32))


def test_a_pool_is_whole_pages():
    with pytest.raises(AssertionError, match="10 slots are not whole pages of 4"):
        SlotAllocator(10, 4)
