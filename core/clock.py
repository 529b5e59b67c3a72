"""Time as an argument: the real clock, and one that tests move by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds for durations, epoch seconds for what clients see."""

    def now(self) -> float: ...

    def epoch(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def epoch(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def epoch(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, seconds
        self._now += seconds
