"""Digests: the same choice on both ranks, whatever the slots; bounded; a flipped byte is seen."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from disagg import checksum
from disagg.checksum import digests, wanted
from disagg.geometry import PageGeometry

GEOMETRY = PageGeometry(kind="mha", slot_bytes=(8, 16, 8), dtype="float32", revision="r")
SLOTS = 32


def pool(geometry=GEOMETRY, slots=SLOTS):
    return [np.zeros((slots, size), np.uint8) for size in geometry.slot_bytes]


def bases(regions):
    return [region.ctypes.data for region in regions]


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 1 << 62), st.integers(1, 12))
def test_equal_content_in_other_slots_has_equal_digests_and_a_flipped_byte_has_not(
    random, room, count
):
    source, target = pool(), pool()
    here, there = (np.array(random.sample(range(SLOTS), count), np.int32) for _ in range(2))
    for mine, theirs in zip(source, target, strict=True):
        mine[here] = np.frombuffer(random.randbytes(count * mine.shape[1]), np.uint8).reshape(
            count, -1
        )
        theirs[there] = mine[here]
    sums = digests(GEOMETRY, bases(source), here, room)
    assert len(sums) == 3
    assert sums == digests(GEOMETRY, bases(target), there, room)
    target[random.randrange(3)][random.choice(there), 3] ^= 1
    assert sums != digests(GEOMETRY, bases(target), there, room)


def test_no_room_reads_more_than_the_limit_and_rooms_take_turns(monkeypatch):
    monkeypatch.setattr(checksum, "CHECK_BYTES", 4 * (8 + 16))
    slots = np.arange(4, dtype=np.int32)
    seen = set()
    for room in range(3):
        sums = digests(GEOMETRY, bases(pool()), slots, room)
        assert 1 <= len(sums) <= 2
        seen |= {(room + step) % 3 for step in range(len(sums))}
    assert seen == {0, 1, 2}


def test_a_region_beyond_the_limit_is_read_from_its_latest_token_back(monkeypatch):
    monkeypatch.setattr(checksum, "CHECK_BYTES", 2 * 16)
    regions, slots = pool(), np.arange(8, dtype=np.int32)
    before = digests(GEOMETRY, bases(regions), slots, 0)
    regions[0][5] = 1
    assert digests(GEOMETRY, bases(regions), slots, 0) == before
    regions[0][7] = 1
    assert digests(GEOMETRY, bases(regions), slots, 0) != before


def test_whole_digests_read_all_regions_and_tokens_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(checksum, "CHECK_BYTES", 2 * 16)
    regions, slots = pool(), np.arange(8, dtype=np.int32)
    before = digests(GEOMETRY, bases(regions), slots, 0, whole=True)
    assert len(before) == 3
    for region in regions:
        region[0] ^= 1
        after = digests(GEOMETRY, bases(regions), slots, 0, whole=True)
        assert after != before
        before = after


def test_nothing_that_crossed_has_no_digests():
    assert digests(GEOMETRY, bases(pool()), np.empty(0, np.int32), 1) == ()


def test_which_rooms_are_checked():
    rooms = range(1, 1000)
    assert not any(wanted("off", room) for room in rooms)
    assert all(wanted("all", room) for room in rooms)
    assert sum(wanted("sample", room) for room in rooms) == 999 // 64
