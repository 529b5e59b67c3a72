"""StepLoop: the thread that owns an engine. One inbox in, reports out, asleep when idle."""

from __future__ import annotations

import gc
import logging
import queue
import threading
from collections.abc import Callable

from core.clock import Clock
from core.rpc.events import RankEvent, StatusAsked
from core.wire import RankInfo, RankStatus, StepReport
from worker.engine import Engine

log = logging.getLogger(__name__)

Deliver = Callable[[str, StepReport], None]

IDLE_WAIT_S = 0.5  # how late an idle rank may notice a time-out of its own
YOUNG_COLLECTION_STEPS = 512  # steps between collections of young garbage while busy


class StepLoop:
    """Implements core.rpc.events.StepPort over an engine.

    Python's automatic garbage collection is off while the loop runs: a full pass over a large
    radix tree takes hundreds of milliseconds. Young garbage is collected every few hundred
    steps, all of it when the rank falls idle.
    """

    def __init__(
        self,
        engine: Engine,
        info: RankInfo,
        clock: Clock,
        deliver: Deliver,
        on_crash: Callable[[], None],
    ) -> None:
        self._engine = engine
        self.info = info
        self._clock = clock
        self._deliver = deliver
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[RankEvent | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._tidy = True  # nothing ran since the last full collection
        self._started_s = clock.now()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: RankEvent) -> None:
        self._inbox.put(event)

    def wake(self) -> None:
        """Something outside the inbox, such as a finished transfer, wants a step."""
        self._inbox.put(None)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after the current step. Requests that are still live are left as they are."""
        self._stopping.set()
        self.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        gc.collect()
        gc.freeze()  # model and libraries never become garbage: keep them out of every pass
        gc.disable()
        try:
            while not self._stopping.is_set():
                self._turn()
        finally:  # an exception goes on to threading.excepthook, which prints it
            gc.enable()
            if not self._stopping.is_set():
                log.critical("the step loop of %s died", self.info.incarnation)
                self._on_crash()

    def _turn(self) -> None:
        for event in self._events():
            if isinstance(event, StatusAsked):
                event.reply(self._status())
            elif event is not None:
                self._engine.handle(event)
        for router, report in self._engine.step(self._clock.now()).items():
            self._deliver(router, report)
        if not self._engine.idle:
            self._tidy = False
            if self._engine.steps % YOUNG_COLLECTION_STEPS == 0:
                gc.collect(1)

    def _events(self) -> list[RankEvent | None]:
        """All that is in the inbox; waits for the first event only where nothing can run."""
        events: list[RankEvent | None] = []
        try:
            if self._engine.idle:
                events.append(self._inbox.get(timeout=IDLE_WAIT_S))
            while True:
                events.append(self._inbox.get_nowait())
        except queue.Empty:
            if not events and not self._tidy:
                gc.collect()
                self._tidy = True
            return events

    def _status(self) -> RankStatus:
        return RankStatus(
            info=self.info,
            load=self._engine.load(),
            pages=self._engine.scheduler.cache.account(),
            handoffs=self._engine.role.counts(),
            uptime_s=self._clock.now() - self._started_s,
        )
