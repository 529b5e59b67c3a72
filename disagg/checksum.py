"""Checksums over the KV that crossed: does the decode rank have what the prefill rank sent?

Both ranks read their own memory and compare digests. "sample" looks at one room in SAMPLE_EVERY,
and reads at most CHECK_BYTES of it, a few milliseconds of work: the latest tokens, of regions that
are another choice in each room. "all" reads every byte of every room.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import numpy as np
import xxhash

from core.wire import Int32Array
from disagg.geometry import PageGeometry

Mode = Literal["off", "sample", "all"]

CHECK_BYTES = 32 << 20
SAMPLE_EVERY = 64  # rooms


def wanted(mode: Mode, room: int) -> bool:
    """Whether the prefill rank is to send the checksums of this room."""
    return mode == "all" or (mode == "sample" and room % SAMPLE_EVERY == 0)


def digests(
    geometry: PageGeometry,
    bases: Sequence[int],
    slots: Int32Array,
    room: int,
    *,
    whole: bool = False,
) -> tuple[int, ...]:
    """64-bit digests of the KV in ``slots``, one for each region that is looked at.

    The same choice of tokens and regions on both ranks, given the same number of slots; all of
    them where ``whole``.
    """
    regions = len(geometry.slot_bytes)
    if not len(slots):
        return ()
    tail = slots if whole else slots[-max(1, CHECK_BYTES // max(geometry.slot_bytes)) :]
    runs = _runs(tail)
    found: list[int] = []
    budget = CHECK_BYTES
    for step in range(regions):
        region = (room + step) % regions
        size = geometry.slot_bytes[region]
        budget -= size * len(tail)
        if budget < 0 and found and not whole:
            break
        found.append(_digest(bases[region], size, runs))
    return tuple(found)


def difference(sent: tuple[int, ...], here: tuple[int, ...]) -> str:
    """How two lists of digests differ, in words."""
    if len(sent) != len(here):
        return f"KV checksums differ: {len(sent)} were sent, {len(here)} computed here"
    at, (theirs, ours) = next(
        (i, p) for i, p in enumerate(zip(sent, here, strict=True)) if p[0] != p[1]
    )
    return f"KV checksums differ: of part {at}, {theirs:016x} was sent and {ours:016x} is here"


def _runs(slots: Int32Array) -> list[tuple[int, int]]:
    """(first slot, slots) of each stretch of consecutive ones, in order."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = np.concatenate(([0], cuts))
    lengths = np.diff(np.append(starts, len(slots)))
    return list(zip(slots[starts].tolist(), lengths.tolist(), strict=True))


def _digest(base: int, size: int, runs: list[tuple[int, int]]) -> int:
    state = xxhash.xxh3_64()
    for first, count in runs:
        state.update((ctypes.c_char * (count * size)).from_address(base + first * size))
    return state.intdigest()
