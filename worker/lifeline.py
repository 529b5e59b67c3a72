"""Lifeline: a rank whose supervisor is gone ends itself, so that no process and no memory is left.

It owns the end of a process, and is used only where a rank has one to itself. It needs neither the
step loop nor the event loop: a thread of its own watches, and behind it stands a timer of the
system (SIGALRM), for an interpreter that something holds for good.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

from core.clock import Clock
from core.lease import Silence

log = logging.getLogger(__name__)

LOOKS = 10  # within the limit: a rank ends at most a tenth late
END_S = 15.0  # to end in order; then the system ends it


class Lifeline:
    """``renewed`` from any thread; ``start`` once the rank can be renewed."""

    def __init__(self, limit_s: float, clock: Clock, end: Callable[[], None]) -> None:
        """``end`` is called once, in a thread, after ``limit_s`` without a renewal."""
        self._limit_s = limit_s
        self._clock = clock
        self._end = end
        self._lock = threading.Lock()
        self._silence = Silence.begun(clock.now())
        self._supervisor = ""
        self._stopped = threading.Event()

    def start(self) -> None:
        """Count from now on."""
        self.renewed("")
        threading.Thread(target=self._run, name="lifeline", daemon=True).start()

    def renewed(self, supervisor: str) -> None:
        """The supervisor is there."""
        with self._lock:
            self._silence = self._silence.heard(self._clock.now())
        signal.setitimer(signal.ITIMER_REAL, self._limit_s + END_S)
        if supervisor and supervisor != self._supervisor:
            log.info("the lease is renewed by supervisor %s", supervisor)
            self._supervisor = supervisor

    def stop(self) -> None:
        """The rank ends by order."""
        self._stopped.set()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def look(self, meant_s: float) -> bool:
        """Whether the lease has run out, after a wait that was meant to take ``meant_s``."""
        with self._lock:
            self._silence = self._silence.after(self._clock.now(), meant_s)
            return self._silence.lasted_s >= self._limit_s

    def _run(self) -> None:
        pause_s = self._limit_s / LOOKS
        while not self._stopped.wait(pause_s):
            if self.look(pause_s):
                log.critical(
                    "no supervisor has renewed this rank's lease for %g s%s: it aborts its requests"
                    " and ends",
                    self._limit_s,
                    f" (the last one was {self._supervisor})" if self._supervisor else "",
                )
                self._end()
                return
