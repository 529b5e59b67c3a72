"""SlotAllocator: which pages are free.

Free space is kept as maximal runs, because the KV transport copies runs: a request whose pages
are consecutive crosses to another rank in a few large copies instead of thousands of small ones
(Mooncake over TCP: 2,000 copies of 8 KiB run at a tenth of the speed of one of 16 MiB).
"""

from __future__ import annotations

import numpy as np

from core.wire import Int32Array


class SlotAllocator:
    """First fit over sorted free runs; falls back to several runs when none is long enough.

    Run ``i`` is ``[starts[i], ends[i])``. Whole arrays at a time, so that a pool in 10,000 pieces
    costs tens of microseconds a call instead of milliseconds.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._starts = np.zeros(min(total, 1), np.int32)
        self._ends = np.full(min(total, 1), total, np.int32)
        self._free = total

    @property
    def free(self) -> int:
        return self._free

    def allocate(self, count: int) -> Int32Array | None:
        """``count`` slots, consecutive where a run allows it; None when there are not enough."""
        if count > self._free:
            return None
        if count == 0:
            return np.empty(0, np.int32)
        lengths = self._ends - self._starts
        first = int((lengths >= count).argmax())
        if lengths[first] >= count:
            last = first
        else:
            first, last = 0, int(np.searchsorted(np.cumsum(lengths), count))
        taken = lengths[first : last + 1]
        taken[-1] -= int(taken.sum()) - count
        slots = _expand(self._starts[first : last + 1], taken)
        self._starts[last] += taken[-1]
        emptied = last + int(self._starts[last] == self._ends[last])
        if emptied > first:
            self._starts = np.delete(self._starts, slice(first, emptied))
            self._ends = np.delete(self._ends, slice(first, emptied))
        self._free -= count
        return slots

    def release(self, slots: Int32Array) -> None:
        """Give slots back, in any order. A slot that is already free is a defect of ours."""
        if not len(slots):
            return
        ordered = np.sort(slots)
        cuts = np.flatnonzero(np.diff(ordered) != 1)
        starts = np.concatenate([self._starts, ordered[:1], ordered[cuts + 1]])
        ends = np.concatenate([self._ends, ordered[cuts] + 1, ordered[-1:] + 1])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        assert starts[0] >= 0, f"slot {starts[0]} is outside the pool"
        assert ends[-1] <= self.total, f"slot {ends[-1] - 1} is outside the pool"
        gaps = starts[1:] - ends[:-1]
        assert not len(gaps) or gaps.min() >= 0, f"slot {starts[1:][gaps < 0][0]} freed twice"
        apart = np.flatnonzero(gaps)
        self._starts = np.concatenate([starts[:1], starts[apart + 1]])
        self._ends = np.concatenate([ends[apart], ends[-1:]])
        self._free += len(slots)

    def reset(self, free: Int32Array) -> None:
        """Forget everything: exactly these slots, in rising order, are free."""
        self._starts = self._ends = np.empty(0, np.int32)
        self._free = 0
        self.release(free)

    def check(self) -> None:
        """Raise AssertionError unless the runs are sorted, apart, and add up."""
        assert bool((self._starts < self._ends).all()), "an empty free run"
        assert bool((self._ends[:-1] < self._starts[1:]).all()), "free runs overlap or touch"
        assert int((self._ends - self._starts).sum()) == self._free


def _expand(starts: Int32Array, lengths: Int32Array) -> Int32Array:
    """The members of several runs, one after the other."""
    before = np.cumsum(lengths) - lengths
    inside = np.arange(int(lengths.sum()), dtype=np.int32)
    slots: Int32Array = (inside + np.repeat(starts - before, lengths)).astype(np.int32)
    return slots
