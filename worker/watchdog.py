"""Watchdog: says once, with a stack, that a turn of the step loop takes too long.

It runs beside the step thread and changes nothing there: a step that hangs in a kernel or a
transport cannot be ended from outside, only the process can.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from core.dump import Busy, format_busy
from worker.recorder import Recorder

log = logging.getLogger(__name__)

ROUNDS = 4  # looks within the limit: a stuck step is reported at most a quarter late
PAUSE_S = 5.0  # at most between two looks


class Watchdog:
    """Call ``look`` every now and then, or let ``run`` do so. Any one thread."""

    def __init__(
        self,
        limit_s: float,
        recorder: Recorder,
        stack: Callable[[], str],
        report: Callable[[], None],
    ) -> None:
        """``stack`` is that of the step thread; ``report`` is called once for each stuck turn."""
        assert limit_s > 0, limit_s
        self._limit_s = limit_s
        self._recorder = recorder
        self._stack = stack
        self._report = report
        self._stuck: Busy | None = None

    def look(self) -> None:
        """Report a turn that has become too long, and its end."""
        busy, stuck = self._recorder.busy(), self._stuck
        if stuck is not None and (busy is None or busy.turn != stuck.turn):
            log.warning("step %d goes on after more than %.1f s", stuck.step, stuck.for_s)
            stuck = self._stuck = None
        if busy is None or busy.for_s < self._limit_s:
            return
        if stuck is None:
            self._report()
            log.error(
                "the step loop is stuck for %.1f s %s; its thread is here:\n%s",
                busy.for_s,
                format_busy(busy),
                self._stack(),
            )
        self._stuck = busy

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(min(self._limit_s / ROUNDS, PAUSE_S))
            self.look()
