"""SlotAllocator: which pages are free.

Free space is kept as maximal runs, because the KV transport copies runs: a request whose pages
are consecutive crosses to another rank in a few large copies instead of thousands of small ones
(Mooncake over TCP: 2,000 copies of 8 KiB run at a tenth of the speed of one of 16 MiB).
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from core.wire import Int32Array


class SlotAllocator:
    """First fit over sorted free runs; falls back to several runs when none is long enough."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._starts = [0] if total else []
        self._lengths = {0: total} if total else {}
        self._free = total

    @property
    def free(self) -> int:
        return self._free

    def allocate(self, count: int) -> Int32Array | None:
        """``count`` slots, consecutive where a run allows it; None when there are not enough."""
        if count > self._free:
            return None
        for start in self._starts:
            if self._lengths[start] >= count:
                return self._take(start, count)
        pieces: list[Int32Array] = []
        left = count
        while left:
            start = self._starts[0]
            piece = self._take(start, min(left, self._lengths[start]))
            pieces.append(piece)
            left -= len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def _take(self, start: int, count: int) -> Int32Array:
        length = self._lengths.pop(start)
        at = bisect_left(self._starts, start)
        if length == count:
            del self._starts[at]
        else:
            self._starts[at] = start + count
            self._lengths[start + count] = length - count
        self._free -= count
        return np.arange(start, start + count, dtype=np.int32)

    def release(self, slots: Int32Array) -> None:
        """Give slots back, in any order. A slot that is already free is a defect of ours."""
        if not len(slots):
            return
        ordered = np.sort(slots)
        cuts = np.flatnonzero(np.diff(ordered) != 1) + 1
        for run in np.split(ordered, cuts):
            self._insert(int(run[0]), len(run))
        self._free += len(slots)

    def _insert(self, start: int, length: int) -> None:
        at = bisect_left(self._starts, start)
        end = start + length
        before = self._starts[at - 1] if at else None
        after = self._starts[at] if at < len(self._starts) else None
        assert start >= 0, start
        assert end <= self.total, f"slots {start}..{end} are outside the pool"
        assert before is None or before + self._lengths[before] <= start, (
            f"slot {start} freed twice"
        )
        assert after is None or end <= after, f"slot {after} freed twice"
        if after == end:
            length += self._lengths.pop(end)
            del self._starts[at]
        if before is not None and before + self._lengths[before] == start:
            self._lengths[before] += length
        else:
            self._starts.insert(at, start)
            self._lengths[start] = length

    def check(self) -> None:
        """Raise AssertionError unless the runs are sorted, apart, and add up."""
        ends = -1
        for start in self._starts:
            assert start > ends, "free runs overlap or touch"
            ends = start + self._lengths[start]
        assert len(self._starts) == len(self._lengths)
        assert sum(self._lengths.values()) == self._free
