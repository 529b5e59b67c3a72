"""What one rank is believed to hold: runs of blocks by age, and those that must stay.

Ages are a linked list for each rank, so that touching, evicting and splitting cost O(1) and a
split keeps the age of both halves. A child is always older than its parent, so the oldest holding
is always a leaf.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from core.block_hash import BlockHashes
from core.wire import Incarnation


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks that are always met together; known by the hash of the first one."""

    hashes: BlockHashes
    holdings: dict[Shelf, Holding] = field(default_factory=dict)


class Holding:
    """The first ``blocks`` of a run, on one rank.

    ``pins`` counts the queued requests that will need it; ``sure`` of its blocks have been computed
    by somebody, the others only will be. ``used_at`` is in seconds of the caller's clock.
    """

    __slots__ = ("blocks", "older", "pins", "run", "shelf", "sure", "used_at", "younger")

    def __init__(self, shelf: Shelf, run: Run) -> None:
        self.shelf = shelf
        self.run = run
        self.blocks = 0
        self.sure = 0
        self.pins = 0
        self.used_at = 0.0
        self.older = self
        self.younger = self

    def unlink(self) -> None:
        self.older.younger = self.younger
        self.younger.older = self.older

    def link_before(self, other: Holding) -> None:
        """Take the place just older than ``other``."""
        self.younger, self.older = other, other.older
        other.older.younger = self
        other.older = self


class Shelf:
    """All holdings of one incarnation of a rank. ``held`` blocks count against the capacity;
    ``pinned`` ones do not, because the rank will evict others to make room for them.
    """

    def __init__(self, owner: Incarnation, capacity: int) -> None:
        self.owner = owner
        self.capacity = capacity  # blocks
        self.held = 0
        self.pinned = 0
        self.gone = False
        nothing = Run(array("Q"))
        self._end = Holding(self, nothing)  # its younger neighbour is the oldest holding
        self._pinned_end = Holding(self, nothing)

    @property
    def oldest(self) -> Holding | None:
        """What is evicted next; None when everything is pinned, or nothing is there."""
        first = self._end.younger
        return None if first is self._end else first

    def holdings(self) -> Iterator[Holding]:
        """Unpinned ones from the oldest on, then the pinned ones in no order."""
        for end in (self._end, self._pinned_end):
            step = end.younger
            while step is not end:
                following = step.younger
                yield step
                step = following

    def add(self, run: Run) -> Holding:
        """An empty holding of ``run``, the youngest."""
        holding = run.holdings[self] = Holding(self, run)
        holding.link_before(self._end)
        return holding

    def resize(self, holding: Holding, blocks: int) -> None:
        change = blocks - holding.blocks
        if holding.pins:
            self.pinned += change
        else:
            self.held += change
        holding.blocks = blocks
        holding.sure = min(holding.sure, blocks)

    def remove(self, holding: Holding) -> None:
        self.resize(holding, 0)
        holding.unlink()
        del holding.run.holdings[self]

    def pin(self, holding: Holding) -> None:
        if not holding.pins:
            holding.unlink()
            holding.link_before(self._pinned_end)
            self.held -= holding.blocks
            self.pinned += holding.blocks
        holding.pins += 1

    def unpin(self, holding: Holding, now: float) -> None:
        """Undo one ``pin``; the last one makes the holding the youngest."""
        assert holding.pins, "unpinned more often than pinned"
        holding.pins -= 1
        if not holding.pins:
            self.held += holding.blocks
            self.pinned -= holding.blocks
            self.touch(holding, now)

    def touch(self, holding: Holding, now: float) -> None:
        """Make an unpinned holding the youngest; call it for children before their parents."""
        if not holding.pins:
            holding.unlink()
            holding.link_before(self._end)
            holding.used_at = now
