"""StepLoop: the thread that owns an engine. One inbox in, reports out, asleep when idle."""

from __future__ import annotations

import gc
import logging
import queue
import threading
from collections.abc import Callable

from core.clock import Clock
from core.dump import RankDump, format_busy, format_step, thread_stacks
from core.lease import Health
from core.rpc.events import QueuesAsked, RankEvent, StatusAsked
from core.wire import RankInfo, RankStatus, StepReport
from worker.engine import Engine
from worker.queues import queues
from worker.recorder import Recorder

log = logging.getLogger(__name__)

Deliver = Callable[[str, StepReport], None]

IDLE_WAIT_S = 0.5  # how late an idle rank may notice a time-out of its own
YOUNG_COLLECTION_STEPS = 512  # steps between collections of young garbage while busy
LONG_S = 1.0  # a turn that takes longer is described to the supervisor
LAST_WORDS = 16  # turns that a dying loop logs


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
        self.recorder = engine.recorder = Recorder(clock)
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

    def health(self) -> Health:
        """See StepPort."""
        busy = self.recorder.busy()
        if busy is None:
            step, turn = self.recorder.at
            return Health(step=step, turn=turn, busy_s=0.0)
        doing = format_busy(busy) if busy.for_s > LONG_S else ""
        return Health(step=busy.step, turn=busy.turn, busy_s=busy.for_s, doing=doing)

    def glance(self) -> RankDump:
        """What can be seen from any thread; see StepPort."""
        return RankDump(
            incarnation=self.info.incarnation,
            pid=self.info.pid,
            uptime_s=self._clock.now() - self._started_s,
            busy=self.recorder.busy(),
            stuck_steps=self._engine.stuck_steps,
            steps=self.recorder.records(),
            threads=thread_stacks(),
        )

    def stack(self) -> str:
        """Where the step thread is; for the watchdog."""
        ident = self._thread.ident
        stacks = () if ident is None else thread_stacks((ident,))
        return stacks[0].stack if stacks else "it has ended"

    def count_stuck(self) -> None:
        """The watchdog found a turn that takes too long."""
        self._engine.stuck_steps += 1

    def _run(self) -> None:
        gc.collect()
        gc.freeze()  # model and libraries never become garbage: keep them out of every pass
        gc.disable()
        try:
            while not self._stopping.is_set():
                self._turn()
        except BaseException as error:
            self._last_words(error)
            raise  # to threading.excepthook
        finally:
            gc.enable()
            if not self._stopping.is_set():
                self._on_crash()  # may end the process

    def _last_words(self, error: BaseException) -> None:
        """Log the exception that ends the loop, what was running, and what ran before."""
        busy = self.recorder.busy()
        log.critical(
            "the step loop of %s died %s; the last steps were:\n%s",
            self.info.incarnation,
            format_busy(busy) if busy is not None else "while it waited",
            "\n".join(map(format_step, self.recorder.records()[-LAST_WORDS:])),
            exc_info=error,
        )

    def _turn(self) -> None:
        events = self._events()
        self.recorder.begin("events")
        for event in events:
            match event:
                case StatusAsked(reply=reply):
                    reply(self._status())
                case QueuesAsked(reply=reply):
                    reply(queues(self._engine, self._clock.now()))
                case None:
                    continue
                case _:
                    self._engine.handle(event)
        for router, report in self._engine.step(self._clock.now()).items():
            self._deliver(router, report)
        self.recorder.end(self._engine.facts())
        if not self._engine.idle:
            self._tidy = False
            if self._engine.steps % YOUNG_COLLECTION_STEPS == 0:
                gc.collect(1)

    def _events(self) -> list[RankEvent | None]:
        """All that is in the inbox; waits for the first event only where nothing can run."""
        events: list[RankEvent | None] = []
        idle = self._engine.idle
        try:
            if idle:
                events.append(self._inbox.get(timeout=IDLE_WAIT_S))
            while True:
                events.append(self._inbox.get_nowait())
        except queue.Empty:
            if idle and not events and not self._tidy:  # never between two steps: it takes a while
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
            transfers=self._engine.role.transfers(),
        )
