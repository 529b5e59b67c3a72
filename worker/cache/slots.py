"""SlotAllocator: which pages are free.

Free space is kept as maximal runs, because the KV transport copies runs: a request whose pages
are consecutive crosses to another rank in a few large copies instead of thousands of small ones
(Mooncake over TCP: 2,000 copies of 8 KiB run at a tenth of the speed of one of 16 MiB).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core.wire import Int32Array

IndexArray = npt.NDArray[np.intp]

NOWHERE = -2  # no slot lies behind it


class SlotAllocator:
    """Best fit over sorted free runs; the longest ones together when none is long enough.

    Run ``i`` is ``[starts[i], ends[i])``. Whole arrays at a time, so that a pool in 10,000 pieces
    costs tens of microseconds a call instead of milliseconds.

    All numbers are slots, and whole pages: page ``p`` begins with slot ``p * page_size``.
    """

    def __init__(self, total: int, page_size: int = 1) -> None:
        assert total % page_size == 0, f"{total} slots are not whole pages of {page_size}"
        self.total = total
        self._page_size = page_size
        self._starts = np.zeros(min(total, 1), np.int32)
        self._ends = np.full(min(total, 1), total, np.int32)
        self._free = total

    @property
    def free(self) -> int:
        return self._free

    def allocate(self, count: int, after: int = NOWHERE) -> Int32Array | None:
        """``count`` slots, in as few runs as possible and rising order; None if there are too few.

        Where that many are free right behind slot ``after`` it is those.
        """
        assert count % self._page_size == 0, f"{count} slots are not whole pages"
        if count > self._free:
            return None
        if count == 0:
            return np.empty(0, np.int32)
        lengths = self._ends - self._starts
        chosen = self._choose(lengths, count, after)
        taken = lengths[chosen]
        taken[-1] -= int(taken.sum()) - count
        slots = _expand(self._starts[chosen], taken)
        self._starts[chosen] += taken
        if (self._starts[chosen] == self._ends[chosen]).any():
            left = self._starts < self._ends
            self._starts, self._ends = self._starts[left], self._ends[left]
        self._free -= count
        return slots

    def _choose(self, lengths: Int32Array, count: int, after: int) -> IndexArray:
        """The runs to take ``count`` slots from, in rising order; the last one may be too long."""
        behind = int(np.searchsorted(self._starts, after + 1))
        if behind < len(lengths) and self._starts[behind] == after + 1 and lengths[behind] >= count:
            return np.array([behind])
        best = int(np.where(lengths >= count, lengths, self.total + 1).argmin())
        if lengths[best] >= count:
            return np.array([best])
        longest = np.argsort(-lengths, kind="stable")
        wanted = int(np.searchsorted(np.cumsum(lengths[longest]), count)) + 1
        return np.sort(longest[:wanted])

    def release(self, slots: Int32Array) -> None:
        """Give slots back, in any order. A slot that is already free is a defect of ours."""
        if not len(slots):
            return
        ordered = np.sort(slots)
        self._check_pages(ordered)
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
        assert not (self._starts % self._page_size).any(), "a free run begins inside a page"
        assert not (self._ends % self._page_size).any(), "a free run ends inside a page"

    def _check_pages(self, ordered: Int32Array) -> None:
        """Raise AssertionError unless these are whole pages."""
        size = self._page_size
        if size > 1:
            assert len(ordered) % size == 0, f"{len(ordered)} slots are not whole pages"
            pages = ordered.reshape(-1, size)
            whole = (pages[:, 0] % size == 0) & (pages[:, -1] - pages[:, 0] == size - 1)
            assert whole.all(), f"a part of page {pages[~whole][0, 0] // size} was freed"


def _expand(starts: Int32Array, lengths: Int32Array) -> Int32Array:
    """The members of several runs, one after the other."""
    before = np.cumsum(lengths) - lengths
    inside = np.arange(int(lengths.sum()), dtype=np.int32)
    slots: Int32Array = (inside + np.repeat(starts - before, lengths)).astype(np.int32)
    return slots
