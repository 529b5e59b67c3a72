"""Headroom: how much of the pool the running sequences are expected to want for output to come.

Nobody knows how long an answer gets. Reserving ``max_new_tokens`` would leave most of the pool
empty; reserving nothing ends in retractions. So a share of what may still come is kept free: it
starts high, falls with every step that decodes, and after a retraction is what the running
sequences have really used of their limits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from worker.sequence import Sequence

FIRST_RATIO = 0.7  # of the output still allowed, at conservativeness 1
LEAST_SHARE = 0.14  # of the first ratio, reached after DECAY_STEPS
DECAY_STEPS = 600  # steps that decode
MOST_OUTPUT = 4096  # tokens of one sequence that are looked ahead
AHEAD_AFTER_RETRACTION = 20  # tokens of each running sequence, beside what it has generated


class Headroom:
    """``conservativeness`` scales every ratio: 0 keeps nothing free, above 1 retracts less."""

    def __init__(self, conservativeness: float, page_size: int = 1) -> None:
        self._conservativeness = conservativeness
        self._page_size = page_size
        self._first = min(1.0, FIRST_RATIO * conservativeness)
        self._least = self._first * LEAST_SHARE
        self.ratio = self._first

    def pages(self, sequences: Iterable[Sequence]) -> int:
        """The slots of all pages that these sequences will want, rounded up."""
        if self._page_size == 1:
            return math.ceil(self.ratio * sum(map(_still_allowed, sequences)))
        return self._page_size * sum(map(self._pages, sequences))

    def _pages(self, sequence: Sequence) -> int:
        """Beyond the page that its last token lies in."""
        end = sequence.length + math.ceil(self.ratio * _still_allowed(sequence))
        return -(-end // self._page_size) - -(-sequence.length // self._page_size)

    def decoded(self) -> None:
        """A step that decodes was planned."""
        self.ratio = max(self._least, self.ratio - (self._first - self._least) / DECAY_STEPS)

    def retracted(self, running: Collection[Sequence]) -> None:
        """Too little was kept free for these; keep at least what they have used so far."""
        used = sum(s.output_len for s in running) + AHEAD_AFTER_RETRACTION * len(running)
        allowed = sum(s.params.max_new_tokens for s in running) + 1
        seen = min(1.0, self._conservativeness * used / allowed)
        self.ratio = max(self.ratio, seen)


def _still_allowed(sequence: Sequence) -> int:
    return min(MOST_OUTPUT, max(0, sequence.params.max_new_tokens - sequence.output_len))
