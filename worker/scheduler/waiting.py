"""The waiting queue: arrival order, retracted sequences first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from worker.sequence import Sequence


class WaitingQueue:
    """First come, first served. What was retracted goes back to the front: it has waited before."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Sequence, None] = OrderedDict()
        self._tokens = 0

    def push(self, sequence: Sequence) -> None:
        self._queue[sequence] = None
        self._tokens += sequence.length

    def push_front(self, sequence: Sequence) -> None:
        self.push(sequence)
        self._queue.move_to_end(sequence, last=False)

    def remove(self, sequence: Sequence) -> None:
        del self._queue[sequence]
        self._tokens -= sequence.length

    @property
    def tokens(self) -> int:
        return self._tokens

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._queue

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        """In order, over a copy: the caller may remove while iterating."""
        return iter(tuple(self._queue))
