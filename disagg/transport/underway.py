"""How many writes are under way through an engine, for whoever wants to end it."""

from __future__ import annotations

import threading


class Underway:
    """Counts writes in and out, from any thread: ``enter`` before each and ``leave`` after it."""

    def __init__(self) -> None:
        self._writes = 0
        self._idle = threading.Condition()

    def enter(self) -> None:
        with self._idle:
            self._writes += 1

    def leave(self) -> None:
        with self._idle:
            self._writes -= 1
            self._idle.notify_all()

    def wait(self, limit_s: float | None = None) -> None:
        """Until none is under way, or ``limit_s`` have passed."""
        with self._idle:
            self._idle.wait_for(lambda: self._writes == 0, limit_s)
