"""Engine: events in, ``step(now)``, reports out. Synchronous, single-threaded, no I/O.

No decision reads a clock: the recorder's only tells how old a request is and how long things took.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from core.clock import RealClock
from core.errors import TransferError
from core.rpc.events import (
    Aborted,
    PeerLost,
    PeerMessage,
    Pinged,
    QueuesAsked,
    RankEvent,
    RouterLost,
    StatusAsked,
    Submitted,
)
from core.wire import (
    ErrorKind,
    FinishReason,
    LoadReport,
    StepReport,
    TokenRequest,
)
from worker.plan import Runner
from worker.recorder import Facts, Recorder
from worker.roles.base import Role
from worker.scheduler.scheduler import Scheduler, Step
from worker.sequence import Sequence, SequenceState
from worker.streams import Streams

log = logging.getLogger(__name__)

ENDED = frozenset({SequenceState.CLOSING, SequenceState.FINISHED})


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step that is not yet collected."""

    step: Step
    ticket: Any  # opaque: the runner's
    launched_s: float


@dataclass(slots=True)
class Engine:
    """One rank's requests from arrival to the last page. Owned by one thread.

    With ``overlap`` a step stays in flight from one ``step`` to the next, which plans and launches
    its successor before it collects it: no more than one between two calls, two within.
    """

    role: Role
    scheduler: Scheduler
    runner: Runner[Any]  # opaque tickets
    streams: Streams
    drop_peer: Callable[[str], None]
    recorder: Recorder = field(default_factory=lambda: Recorder(RealClock()))
    steps: int = 0
    stuck_steps: int = 0  # counted by the watchdog
    overlap: bool = False
    strict: bool = True  # whether pages that do not add up raise AssertionError; else repaired
    page_repairs: int = 0
    _flight: Flight | None = None
    _collected_s: float = 0.0
    _pinged: set[str] = field(default_factory=set)
    _stuck: bool = False  # the last step found nothing to run, and no event came since

    def handle(self, event: RankEvent) -> None:
        """Take one event of the inbox."""
        self._stuck = False
        match event:
            case Submitted(router, request):
                self._submit(router, request)
            case Aborted(router, rid, done):
                sequence = self.streams.find(rid)
                if sequence is not None and sequence.router == router:
                    self._abort(sequence, "" if done else "stopped by the router")
            case RouterLost(router):
                for sequence in self.streams.of_router(router):
                    self._abort(sequence, "the session of the router ended")
            case Pinged(router):
                self._pinged.add(router)
            case PeerMessage(peer, data):
                self._hear(peer, data)
            case PeerLost(peer):
                self.role.on_peer_lost(peer)
            case StatusAsked() | QueuesAsked():
                raise AssertionError("the step loop answers for itself")

    def _hear(self, peer: str, data: bytes) -> None:
        try:
            self.role.on_peer(peer, data)
        except TransferError as error:
            log.error("the link %s makes no sense and is dropped: %s", peer, error)
            self.drop_peer(peer)  # PeerLost follows

    def step(self, now: float) -> dict[str, StepReport]:
        """Run one step if anything can run; what is to be said to each router.

        With overlap, what is said is of the step before.
        """
        lap = self.recorder.lap
        lap("poll")
        self.role.poll(now)
        lap("plan")
        step = self.scheduler.next_plan(now)
        launched = None
        if step is not None:
            self.recorder.planned(self.steps + 1, step)
            if self.streams.spans is not None:
                self.streams.spans.launched(step)
            lap("launch")
            began = self.recorder.clock.now()
            launched = Flight(step, self.runner.launch(step.plan), began)
            self.steps += 1
        due, self._flight = (self._flight, launched) if self.overlap else (launched, None)
        self._stuck = launched is None and due is None
        if due is not None:
            self._collect(due)
        self._audit()
        lap("report")
        return self._reports()

    def _collect(self, flight: Flight) -> None:
        self.recorder.lap("collect")
        result = self.runner.collect(flight.ticket)
        began, now = max(flight.launched_s, self._collected_s), self.recorder.clock.now()
        self._collected_s = now
        self.role.stepped(flight.step, now - began)
        self.recorder.lap("absorb")
        for progress in self.scheduler.absorb(flight.step, result):
            if self.streams.spans is not None:
                self.streams.spans.computed(progress)
            self.role.advance(progress)

    def _audit(self) -> None:
        """Pages must add up. Where they do not it is our defect, and serving goes on."""
        cache = self.scheduler.cache
        if cache.sound(quiet=not len(self.streams) and self._flight is None):
            return
        assert not self.strict, f"pages do not add up: {cache.account()}"
        if not self.page_repairs:
            log.error("pages do not add up, and are counted afresh: %s", cache.account())
        self.page_repairs += 1
        cache.repair(self.streams.sequences())

    def facts(self) -> Facts:
        """How it stands, for the recorder: nothing that would have to be counted."""
        scheduler = self.scheduler
        return Facts(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            live=len(self.streams),
            free_pages=scheduler.cache.slots.free // scheduler.cache.page_size,
            retractions=scheduler.retractions,
        )

    @property
    def idle(self) -> bool:
        """Nothing can run before the next event; requests may wait, for a peer or its pages."""
        return self._flight is None and (self.scheduler.idle or self._stuck)

    def load(self) -> LoadReport:
        waiting = [*self.scheduler.waiting, *self.role.waiting]
        account = self.scheduler.cache.account()
        sent, received = self.role.kv_bytes
        now = self.recorder.clock.now()
        return LoadReport(
            waiting_requests=len(waiting),
            waiting_tokens=sum(s.length for s in waiting) + self.scheduler.uncomputed_tokens,
            running_requests=len(self.scheduler.running),
            handoff_requests=max(0, len(self.streams) - len(waiting) - len(self.scheduler.running)),
            free_pages=account.free,
            cached_pages=self.scheduler.cache.tree.evictable // self.scheduler.cache.page_size,
            total_pages=account.total,
            steps=self.steps,
            prompt_tokens=self.streams.prompt_tokens,
            cached_tokens=self.streams.cached_tokens,
            output_tokens=self.streams.output_tokens,
            retractions=self.scheduler.retractions,
            kv_bytes_sent=sent,
            kv_bytes_received=received,
            oldest_waiting_s=max((now - s.arrived_s for s in waiting), default=0.0),
            last_step_s=self.recorder.last_step_s,
            busy_s=self.recorder.busy_s,
            stuck_steps=self.stuck_steps,
            page_repairs=self.page_repairs,
        )

    def _reports(self) -> dict[str, StepReport]:
        said = self.streams.take()
        pinged, self._pinged = self._pinged, set()
        routers = pinged | said.keys()
        if not routers:
            return {}
        load, transfers = self.load(), self.role.transfers() if pinged else None
        return {
            router: StepReport(
                chunks=tuple(said.get(router, ())),
                load=load,
                transfers=transfers if router in pinged else None,
            )
            for router in routers
        }

    def _submit(self, router: str, request: TokenRequest) -> None:
        if problem := self._problem(request):
            self.streams.refuse(request, router, ErrorKind.INVALID, problem)
            self.role.refuse(request, ErrorKind.INVALID, problem)
            return
        sequence = Sequence.of(request, router, self.scheduler.limits.context_len)
        sequence.arrived_s = self.recorder.clock.now()
        self.streams.open(sequence)
        log.info(
            "submitted: %d tokens, of which %d prompt, at most %d of output, room %d",
            len(request.token_ids) // 4,
            request.prompt_len,
            request.params.max_new_tokens,
            request.route.room,
            extra={"rid": request.rid},
        )
        self.role.admit(sequence)

    def _problem(self, request: TokenRequest) -> str | None:
        """Why the request can never work here; the backstop behind the front door."""
        length, most = len(request.token_ids) // 4, self.scheduler.limits.context_len
        if not 0 < request.prompt_len <= length:
            return "a request needs at least one prompt token"
        if length >= most:
            return f"the prompt has {length} tokens, and this rank takes at most {most - 1}"
        if request.params.max_new_tokens <= length - request.prompt_len:
            return "max_new_tokens must be larger than the output so far"
        if self.streams.find(request.rid) is not None:
            return f"request id {request.rid!r} is in use"
        return None

    def _abort(self, sequence: Sequence, why: str) -> None:
        """``why`` for its spans; empty: nothing went wrong."""
        if sequence.state not in ENDED:
            if sequence.timeline is not None:
                sequence.timeline.stop(why)
            self.role.stop(sequence, FinishReason.ABORT, None)
