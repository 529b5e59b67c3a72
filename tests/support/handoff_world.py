"""A small world of prefill and decode ranks under virtual time, to torment the handoff in.

Two prefill and two decode ranks, real Senders, Receivers and in-process transports. Everything
that takes time or can go wrong is drawn from one seeded generator: messages are delayed and
repeated, links break and return, writes wait, fail, and land late. The world owns the pages the
way an engine does, and checks with every byte moved that its owner allows it.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from core.errors import TransferError
from core.wire import ErrorKind
from disagg.geometry import PageGeometry
from disagg.receiver import Failed, Outcome, Ready, Receiver, Released
from disagg.registers import Closed
from disagg.sender import Sender
from disagg.transport.base import Copy
from disagg.transport.inproc import Fault, Hub, InprocTransport
from tests.support.page_pool import SLOT_BYTES, SLOTS, Pool

TICK_S = 0.02
CLAIM_TIMEOUT_S = 3.0
GEOMETRY = PageGeometry(kind="mha", slot_bytes=SLOT_BYTES, dtype="float32", revision="r1")


@dataclass(frozen=True)
class Trouble:
    """Probabilities and rates of what goes wrong."""

    cancel: float = 0.2  # of a room
    abort: float = 0.2
    absent: float = 0.1  # one leg never comes
    write_fails: float = 0.2
    duplicate: float = 0.2  # of a message
    link_losses: int = 3  # in a run


@dataclass
class Prefill:
    pool: Pool
    sender: Sender
    live: dict[int, "Job"] = field(default_factory=dict)  # opened, not Closed
    closed: dict[int, Closed] = field(default_factory=dict)


@dataclass
class Decode:
    pool: Pool
    receiver: Receiver
    pending: set[int] = field(default_factory=set)  # announced, neither Ready nor Released
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)


@dataclass
class Job:
    """One request."""

    room: int
    prefill: int
    decode: int
    tokens: int
    held: int
    first_token: int
    source: np.ndarray | None = None
    target: np.ndarray | None = None
    computed: int = 0
    content: list[bytes] = field(default_factory=list)  # of the source, once all is computed


@dataclass
class Link:
    """The ordered peer link of one pair; ``epoch`` counts its lives, odd while it is down."""

    epoch: int = 0
    unaware: set[str] = field(default_factory=set)  # ends that still have to hear of the loss
    queues: dict[str, deque[bytes]] = field(default_factory=lambda: {"p": deque(), "d": deque()})


class World:
    """Run ``jobs`` requests under ``trouble``; ``run`` returns when all is over and checked."""

    def __init__(self, seed: int, jobs: int, trouble: Trouble) -> None:
        self.rng = random.Random(seed)
        self.trouble = trouble
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.hub = Hub(fault=self._fault, on_read=self._on_read, on_land=self._on_land)
        self.links = {(d, p): Link() for d in range(2) for p in range(2)}
        self.prefills = [self._prefill(p) for p in range(2)]
        self.decodes = [self._decode(d) for d in range(2)]
        self.jobs = [self._job(room) for room in range(1, jobs + 1)]
        self.late_landed = self.late_dropped = 0

    # --- set-up -------------------------------------------------------------------------------

    def _transport(self, pool: Pool) -> InprocTransport:
        transport = InprocTransport(self.hub)
        transport.register(pool.memory())
        return transport

    def _prefill(self, p: int) -> Prefill:
        pool = Pool(self.rng)
        sender = Sender(
            self._transport(pool),
            GEOMETRY,
            pool.bases,
            lambda peer, data: self._send((int(peer[1:]), p), "d", data),
            lambda: None,
            CLAIM_TIMEOUT_S,
            self._submit,
        )
        return Prefill(pool, sender)

    def _decode(self, d: int) -> Decode:
        pool = Pool(self.rng)
        receiver = Receiver(
            self._transport(pool),
            GEOMETRY,
            pool.bases,
            lambda peer, data: self._send((d, int(peer[1:])), "p", data),
        )
        return Decode(pool, receiver)

    def _job(self, room: int) -> Job:
        rng, trouble = self.rng, self.trouble
        tokens = rng.randint(1, 14)
        held = rng.choice([0, rng.randint(0, tokens)])
        job = Job(room, rng.randrange(2), rng.randrange(2), tokens, held, rng.randrange(1000))
        start = rng.uniform(0, 4)
        absent = rng.random() < trouble.absent
        leg = rng.random() < 0.5
        if not (absent and leg):
            self._at(start + rng.uniform(0, 0.3), lambda: self._reserve(job))
        if not (absent and not leg):
            self._at(start + rng.uniform(0, 0.3), lambda: self._open(job))
        if rng.random() < trouble.cancel:
            delay = rng.uniform(0, 1)
            self._at(start + delay, lambda: self._cancel(job))
        if rng.random() < trouble.abort:
            delay = rng.uniform(0, 1)
            self._at(start + delay, lambda: self._abort(job))
        return job

    # --- time ---------------------------------------------------------------------------------

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, action))

    def _soon(self, most: float, action: Callable[[], None]) -> None:
        self._at(self.now + self.rng.uniform(0, most), action)

    def run(self) -> None:
        for _ in range(self.trouble.link_losses):
            pair = self.rng.choice(list(self.links))
            self._at(self.rng.uniform(0, 5), lambda pair=pair: self._lose(pair))
        self._at(0.0, self._tick)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            assert self.now < 60, "the world never comes to rest"
            action()
        self._check_end()

    def _tick(self) -> None:
        for prefill in self.prefills:
            for closed in prefill.sender.poll(self.now):
                self._on_closed(prefill, closed)
        for decode in self.decodes:
            for outcome in decode.receiver.poll():
                self._on_outcome(decode, outcome)
        if self.hub.late and self.rng.random() < 0.1:
            self._land_late()
        if self.now < 25:
            self._at(self.now + TICK_S, self._tick)

    # --- the decode engine --------------------------------------------------------------------

    def _reserve(self, job: Job) -> None:
        decode = self.decodes[job.decode]
        job.target = decode.pool.take(job.room, job.tokens - job.held, self.rng)
        if job.target is None:
            self._soon(0.5, lambda: self._reserve(job))
            return
        decode.pending.add(job.room)
        peer = f"p{job.prefill}"
        decode.receiver.announce(job.room, f"r{job.room}", peer, job.held, job.target)

    def _cancel(self, job: Job) -> None:
        self.decodes[job.decode].receiver.cancel(job.room, "the client left")

    def _on_outcome(self, decode: Decode, outcome: Outcome) -> None:
        seen = decode.outcomes.setdefault(outcome.room, [])
        assert outcome.room in decode.pending, ("resurrected", outcome, seen)
        seen.append(outcome)
        if isinstance(outcome, Failed):
            assert len(seen) == 1, seen
            return
        decode.pending.discard(outcome.room)
        if isinstance(outcome, Released):
            assert len(seen) == 2, seen
            decode.pool.free(outcome.room, self.rng)
        else:
            assert len(seen) == 1, seen
            self._check_content(decode, outcome)
            self._soon(1.0, lambda: decode.pool.free(outcome.room, self.rng))

    def _check_content(self, decode: Decode, ready: Ready) -> None:
        job = self.jobs[ready.room - 1]
        assert job.target is not None
        assert ready.first_token == job.first_token
        assert decode.pool.read(job.target) == job.content, ("wrong bytes", job)

    # --- the prefill engine -------------------------------------------------------------------

    def _open(self, job: Job) -> None:
        prefill = self.prefills[job.prefill]
        job.source = prefill.pool.take(job.room, job.tokens, self.rng)
        if job.source is None:
            self._soon(0.5, lambda: self._open(job))
            return
        prefill.live[job.room] = job
        prefill.sender.open(job.room, f"r{job.room}", job.tokens)
        self._soon(0.2, lambda: self._compute(job))

    def _compute(self, job: Job) -> None:
        prefill = self.prefills[job.prefill]
        if job.room not in prefill.live:
            return
        assert job.source is not None
        upto = min(job.tokens, job.computed + self.rng.randint(1, 6))
        for slot in job.source[job.computed : upto]:
            prefill.pool.fill(int(slot), self.rng)
        job.computed = upto
        if upto == job.tokens:
            job.content = prefill.pool.read(job.source[job.held :])
        prefill.sender.push(job.room, job.source[:upto])
        if upto == job.tokens:
            prefill.sender.finish(job.room, job.first_token)
        else:
            self._soon(0.3, lambda: self._compute(job))

    def _abort(self, job: Job) -> None:
        self.prefills[job.prefill].sender.abort(job.room, ErrorKind.UNAVAILABLE, "draining")

    def _on_closed(self, prefill: Prefill, closed: Closed) -> None:
        assert closed.room not in prefill.closed, ("closed twice", closed)
        prefill.closed[closed.room] = closed
        del prefill.live[closed.room]
        prefill.pool.free(closed.room, self.rng)

    # --- links --------------------------------------------------------------------------------

    def _send(self, pair: tuple[int, int], to: str, data: bytes) -> None:
        link = self.links[pair]
        if link.epoch % 2:
            end = "d" if to == "p" else "p"
            if end not in link.unaware:  # a message dropped is a loss to report, in this life
                link.unaware.add(end)
                self._soon(1.0, lambda: self._notice(pair, end))
            return
        epoch = link.epoch
        link.queues[to].append(data)
        self._soon(0.1, lambda: self._deliver(pair, to, epoch))

    def _deliver(self, pair: tuple[int, int], to: str, epoch: int) -> None:
        """One message arrives: the oldest, so order holds whatever the delays are."""
        link = self.links[pair]
        if link.epoch != epoch:
            return
        data = link.queues[to].popleft()
        self._hand_over(pair, to, data)
        if self.rng.random() < self.trouble.duplicate:
            self._soon(2.0, lambda: self._hand_over(pair, to, data))

    def _hand_over(self, pair: tuple[int, int], to: str, data: bytes) -> None:
        d, p = pair
        if to == "p":
            self.prefills[p].sender.on_message(f"d{d}", data)
        else:
            self.decodes[d].receiver.on_message(f"p{p}", data)

    def _lose(self, pair: tuple[int, int]) -> None:
        """Break a link: what is under way is lost; each end hears of it in its own time."""
        link = self.links[pair]
        if link.epoch % 2:
            return
        link.epoch += 1
        link.queues = {"p": deque(), "d": deque()}
        link.unaware = {"p", "d"}
        for end in ("p", "d"):
            self._soon(1.0, lambda end=end: self._notice(pair, end))

    def _notice(self, pair: tuple[int, int], end: str) -> None:
        link = self.links[pair]
        link.unaware.discard(end)
        self._tell_loss(pair, end)
        if not link.unaware:
            self._soon(1.0, lambda: self._restore(link))

    def _restore(self, link: Link) -> None:
        if link.epoch % 2 and not link.unaware:
            link.epoch += 1

    def _tell_loss(self, pair: tuple[int, int], end: str) -> None:
        d, p = pair
        if end == "p":
            self.prefills[p].sender.on_peer_lost(f"d{d}")
        else:
            self.decodes[d].receiver.on_peer_lost(f"p{p}")

    # --- writes -------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], int]) -> "Future[int]":
        future: Future[int] = Future()

        def run() -> None:
            try:
                result = job()
            except TransferError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._soon(0.3, run)
        return future

    def _fault(self, _target: str, _copies: object) -> Fault:
        if self.rng.random() >= self.trouble.write_fails:
            return Fault.NONE
        return self.rng.choice([Fault.FAIL, Fault.LATE, Fault.LATE])

    def _land_late(self) -> None:
        if self.hub.release_late(self.rng.choice(self.hub.late)):
            self.late_landed += 1
        else:
            self.late_dropped += 1

    def _on_read(self, copy: Copy) -> None:
        """The law of the prefill side: what is read belongs to a room that has not closed."""
        for prefill in self.prefills:
            owners = prefill.pool.owners_of(copy.source, copy.length)
            if owners is not None:
                assert len(owners) == 1, ("read across rooms", owners)
                assert owners <= prefill.live.keys(), ("read of a released page", owners)

    def _on_land(self, copy: Copy) -> None:
        """The law of the decode side: what is written belongs to a room that still awaits it."""
        for decode in self.decodes:
            owners = decode.pool.owners_of(copy.target, copy.length)
            if owners is not None:
                assert len(owners) == 1, ("written across rooms", owners)
                assert owners <= decode.pending, ("late write in a released page", owners)

    # --- the end ------------------------------------------------------------------------------

    def _check_end(self) -> None:
        while self.hub.late:
            self._land_late()
        for prefill in self.prefills:
            assert not prefill.live, ("never closed", prefill.live, prefill.sender.counts())
            assert prefill.sender.counts() == {}
            assert prefill.pool.owner == [None] * SLOTS
        for decode in self.decodes:
            assert not decode.pending, ("never ended", decode.pending, decode.receiver.counts())
            assert decode.receiver.counts() == {}
            assert decode.pool.owner == [None] * SLOTS
