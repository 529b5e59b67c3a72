"""The waiting queue: higher priority first, then what was retracted, then the configured order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from core.registry import Entry, Registry
from worker.cache.radix import RadixTree
from worker.scheduler.orders import Fcfs
from worker.sequence import Sequence


class Order(Protocol):
    """Ranks waiting sequences. Made from the rank's tree and context length."""

    def add(self, sequence: Sequence, queued_s: float) -> None:
        """It waits, and has done so since ``queued_s``, on the clock of ``now``."""
        ...

    def remove(self, sequence: Sequence) -> None: ...

    def stale(self, now: float) -> bool:
        """Whether another ``arrange`` could differ though nothing was added. Cheap."""
        ...

    def arrange(self, now: float) -> list[Sequence]:
        """All that were added and not removed, the next one first."""
        ...


ORDERS: Registry[Order] = Registry(
    "schedule",
    {
        "fcfs": Entry("worker.scheduler.orders:Fcfs"),
        "lpm": Entry("worker.scheduler.orders:LongestPrefix"),
        "dfs_weight": Entry("worker.scheduler.orders:DfsWeight"),
    },
)

Class = tuple[int, int]  # smaller goes first: minus priority, minus number of the retraction


class WaitingQueue:
    """In an order; first come, first served where none is given.

    What was retracted goes before its equals, the latest first: it has waited before.
    """

    def __init__(self, order: Order | None = None) -> None:
        self._order: Order = order or Fcfs(RadixTree(), 1)
        self._class: dict[Sequence, Class] = {}  # every member
        self._classes: Counter[Class] = Counter()
        self._new: dict[Sequence, None] = {}  # not yet known to the order
        self._arranged: list[Sequence] = []  # may name some that have left
        self._now = 0.0
        self._retractions = 0
        self._tokens = 0

    def push(self, sequence: Sequence) -> None:
        self._add(sequence, (-sequence.priority, 0))

    def push_front(self, sequence: Sequence) -> None:
        """Before all of its priority."""
        self._retractions += 1
        self._add(sequence, (-sequence.priority, -self._retractions))

    def remove(self, sequence: Sequence) -> None:
        kind = self._class.pop(sequence)
        self._classes[kind] -= 1
        if not self._classes[kind]:
            del self._classes[kind]
        self._tokens -= sequence.length
        if sequence in self._new:
            del self._new[sequence]
        else:
            self._order.remove(sequence)

    def arrange(self, now: float) -> None:
        """Put everybody in order, as of ``now`` in seconds of a monotonic clock."""
        self._now = now
        if not self._new and not self._order.stale(now):
            return
        for sequence in self._new:
            if sequence.queued_s is None:
                sequence.queued_s = now
            self._order.add(sequence, sequence.queued_s)
        self._new.clear()
        self._arranged = self._order.arrange(now)
        if len(self._classes) > 1:
            self._arranged.sort(key=self._class.__getitem__)  # stable

    @property
    def tokens(self) -> int:
        return self._tokens

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._class

    def __len__(self) -> int:
        return len(self._class)

    def __iter__(self) -> Iterator[Sequence]:
        """In order; the caller may remove while iterating."""
        if self._new:
            self.arrange(self._now)
        return (sequence for sequence in self._arranged if sequence in self._class)

    def _add(self, sequence: Sequence, kind: Class) -> None:
        self._class[sequence] = kind
        self._classes[kind] += 1
        self._new[sequence] = None
        self._tokens += sequence.length
