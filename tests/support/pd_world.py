"""A prefill and a decode engine without a model, joined by a network that delays and breaks.

The KV is real memory (see fake_runner), moved by the in-process transport, so that a page written
late, released early or copied to the wrong place changes the tokens.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from core.clock import VirtualClock
from core.rpc.events import Aborted, PeerLost, PeerMessage, RouterLost, Submitted
from core.wire import FinishReason, Incarnation, Route, TokenChunk
from disagg.geometry import PageGeometry
from disagg.receiver import Receiver
from disagg.sender import Sender
from disagg.transport.base import MemoryRegion
from disagg.transport.inproc import Fault, Hub, InprocTransport
from tests.support.fake_runner import generate_until, runner_for
from tests.support.requests import incarnation, request
from tests.support.salts import check_pages, check_salts
from worker.cache.prefix_cache import PrefixCache
from worker.engine import Engine
from worker.recorder import Recorder
from worker.roles.decode import DecodeRole
from worker.roles.local_prefill import LocalPrefill, Mode
from worker.roles.prefill import PrefillRole
from worker.scheduler.admission import Limits
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.waiting import ORDERS
from worker.sequence import SequenceState
from worker.streams import Streams

CONTEXT = 40
WHAT = ("arrive", "prefill", "decode", "decode", "hear", "hear", "write", "land")
MODES: tuple[Mode, ...] = ("auto", "auto", "off", 2, 8, CONTEXT)
PREFILL, DECODE = incarnation("prefill"), incarnation("decode")


@dataclass
class Asked:
    prompt: list[int]
    count: int
    router: str
    tokens: dict[int, int] = field(default_factory=dict)
    ended: dict[str, FinishReason | None] = field(default_factory=dict)
    local: bool = False  # the decode rank computed the prompt
    stops: tuple[int, ...] = ()
    stopped: bool = False  # by the harness: the router left, or the link broke

    @property
    def output(self) -> list[int]:
        return [self.tokens[i] for i in range(len(self.tokens))]


class PdWorld:
    """Everything random comes from one seed."""

    def __init__(
        self,
        seed: int,
        *,
        late: float = 0.0,
        link_losses: int = 0,
        aborts: float = 0.0,
        local: Mode | None = None,
        overlap: bool | None = None,
        page_size: int = 1,
    ):
        self.random = random.Random(seed)
        self.extras = random.Random(f"{seed}")  # not to change what else a seed means
        self.overlap, self.page_size = overlap, page_size
        self.clock = VirtualClock()
        self.local = LocalPrefill(self.random.choice(MODES) if local is None else local, 16)
        self.check = self.random.choice(["off", "all"])
        self.late, self.link_losses, self.aborts = late, link_losses, aborts
        self.hub = Hub(fault=lambda *_: Fault.LATE if self.random.random() < late else Fault.NONE)
        self.jobs: deque = deque()
        self.to_prefill: deque[bytes] = deque()
        self.to_decode: deque[bytes] = deque()
        self.arriving: list[tuple[Engine, Submitted]] = []
        self.link = 0
        self.asked: dict[str, Asked] = {}
        self.prefill = self._engine("prefill", pages=self.random.randint(CONTEXT, 120))
        self.decode = self._engine("decode", pages=self.random.randint(CONTEXT, 60))

    # --- building ---------------------------------------------------------------------------

    def _engine(self, role: str, pages: int) -> Engine:
        running = self.random.randint(1, 5)
        pages = -(-pages // self.page_size) * self.page_size
        cache = PrefixCache(pages, 2 * running, CONTEXT, self.page_size)
        limits = Limits(
            max_running=running,
            step_tokens=self.random.randint(2, 24),
            context_len=CONTEXT,
            conservativeness=0.3 if role == "decode" else 0,
        )
        overlap = self.extras.random() < 0.5 if self.overlap is None else self.overlap
        streams, runner = Streams(), runner_for(cache, defers=overlap)
        transport = InprocTransport(self.hub)
        transport.register([MemoryRegion(base, size * pages) for base, size in runner.regions()])
        geometry = PageGeometry(
            kind="mha", slot_bytes=(8,), dtype="i8", revision="r", page_size=self.page_size
        )
        bases = [base for base, _ in runner.regions()]
        scheduler = Scheduler(cache, limits, self.extras.choice(list(ORDERS)))
        if role == "prefill":
            sender = Sender(
                transport,
                geometry,
                bases,
                self._say_decode,
                lambda: None,
                1e9,
                self._later,
                self.check,
            )
            behaviour = PrefillRole(scheduler, streams, sender, frozenset())
        else:
            receiver = Receiver(transport, geometry, bases, self._say_prefill, self.clock)
            behaviour = DecodeRole(
                scheduler, streams, receiver, self._dial, frozenset(), self.local
            )
        recorder = Recorder(self.clock)
        runner.before = lambda: self.clock.advance(self.random.random())
        return Engine(
            behaviour, scheduler, runner, streams, lambda peer: None, recorder, overlap=overlap
        )

    def _dial(self, target: Incarnation) -> str:
        assert target == PREFILL
        return f"link{self.link}"

    def _say_prefill(self, peer: str, data: bytes) -> None:
        if peer == f"link{self.link}":
            self.to_prefill.append(data)

    def _say_decode(self, peer: str, data: bytes) -> None:
        if peer == f"link{self.link}":
            self.to_decode.append(data)

    def _later(self, job) -> Future[int]:
        future: Future[int] = Future()
        self.jobs.append((job, future))
        return future

    # --- what happens -----------------------------------------------------------------------

    def submit(self, rid: str) -> None:
        draw = self.random
        stem = draw.randint(0, 2)
        prompt = [stem * 7 + i % 5 for i in range(draw.randint(0, 20))]
        prompt += [draw.randint(0, 3) for _ in range(draw.randint(1, 8))]
        count = draw.randint(1, min(10, CONTEXT - len(prompt)))
        asked = self.asked[rid] = Asked(prompt, count, draw.choice("ab"))
        route = Route(room=draw.getrandbits(63), prefill=PREFILL, decode=DECODE)
        salt = draw.choice(["", "mine"])
        extras = self.extras
        asked.stops = tuple(range(10)) if extras.random() < 0.3 else ()
        wanted = request(
            rid,
            prompt,
            count,
            route=route,
            salt=salt,
            priority=extras.choice([0, 0, 1]),
            stop_token_ids=asked.stops,
        )
        event = Submitted(asked.router, wanted)
        self.arriving += [(self.prefill, event), (self.decode, event)]

    def turn(self) -> None:
        """One random thing."""
        self.clock.advance(self.random.random() / 4)
        what = self.random.choice(WHAT)
        if what == "arrive" and self.arriving:
            engine, event = self.arriving.pop(self.random.randrange(len(self.arriving)))
            engine.handle(event)
        elif what == "prefill":
            self._step(self.prefill, "prefill")
        elif what == "decode":
            self._step(self.decode, "decode")
        elif what == "hear":
            self._hear()
        elif what == "write" and self.jobs:
            self._run_job()
        elif what == "land" and self.hub.late:
            self.hub.release_late(self.random.choice(self.hub.late))

    def _hear(self) -> None:
        if self.to_prefill and self.random.random() < 0.5:
            self.prefill.handle(PeerMessage(f"link{self.link}", self.to_prefill.popleft()))
        elif self.to_decode:
            self.decode.handle(PeerMessage(f"link{self.link}", self.to_decode.popleft()))

    def _run_job(self) -> None:
        job, future = self.jobs.popleft()
        try:
            future.set_result(job())
        except Exception as error:  # noqa: BLE001  what a thread pool does
            future.set_exception(error)

    def _step(self, engine: Engine, leg: str) -> None:
        for router, report in engine.step(self.clock.now()).items():
            for chunk in report.chunks:
                self._heard(self.asked[chunk.rid], router, leg, chunk)
        engine.scheduler.cache.check()
        check_salts(engine)
        check_pages(engine)

    def _heard(self, asked: Asked, router: str, leg: str, chunk: TokenChunk) -> None:
        assert router == asked.router
        assert leg not in asked.ended, f"{leg} goes on after its last chunk"
        asked.local |= leg == "decode" and chunk.offset == 0 and bool(chunk.token_ids)
        for i, token in enumerate(chunk.token_ids):
            assert asked.tokens.setdefault(chunk.offset + i, token) == token, "legs disagree"
        if chunk.last or chunk.finish is not None:
            asked.ended[leg] = chunk.finish
            if chunk.finish is FinishReason.ERROR:
                asked.stopped = True

    def trouble(self) -> None:
        draw = self.random
        if self.asked and draw.random() < self.aborts:
            rid = draw.choice(sorted(self.asked))
            self.asked[rid].stopped = True
            self._abort(rid)
        if draw.random() < self.aborts / 10:
            for rid, asked in self.asked.items():
                if asked.router == "b":
                    self._abort(rid)
                    asked.stopped = True
            for engine in (self.prefill, self.decode):
                engine.handle(RouterLost("b"))
        if self.link_losses and draw.random() < 0.05:
            self.link_losses -= 1
            self.break_link()

    def break_link(self) -> None:
        peer, self.link = f"link{self.link}", self.link + 1
        self.to_prefill.clear()
        self.to_decode.clear()
        self.prefill.handle(PeerLost(peer))
        self.decode.handle(PeerLost(peer))

    def abort_orphans(self) -> None:
        """What a router does: when one leg fails, or does all, the other is no longer wanted."""
        for rid, asked in self.asked.items():
            if FinishReason.ERROR in asked.ended.values():
                self._abort(rid)
            elif self.link and asked.local and asked.ended.get("decode"):
                self._abort(rid)  # where links break, the prefill rank may not have been told

    def _abort(self, rid: str) -> None:
        """To both legs, after what the router sent them before."""
        for engine, event in [a for a in self.arriving if a[1].request.rid == rid]:
            engine.handle(event)
            self.arriving.remove((engine, event))
        for engine in (self.prefill, self.decode):
            engine.handle(Aborted(self.asked[rid].router, rid))

    def run(self, requests: int) -> None:
        for n in range(requests):
            self.submit(f"r{n}")
            for _ in range(self.random.randint(0, 30)):
                self.turn()
            self.trouble()
            self.abort_orphans()
        for _ in range(20_000):
            if self.over():
                break
            self.turn()
            self.abort_orphans()
        self.verify()

    def over(self) -> bool:
        return (
            all(len(a.ended) == 2 for a in self.asked.values())
            and not len(self.prefill.streams)
            and not len(self.decode.streams)
            and not self.prefill.scheduler.cache.in_flight
            and not self.decode.scheduler.cache.in_flight
        )

    def verify(self) -> None:
        states = [s.state for e in (self.prefill, self.decode) for s in e.streams.sequences()]
        assert self.over(), f"stuck: {states}, {self.prefill.role.counts()}"
        assert SequenceState.RUNNING not in states
        for asked in self.asked.values():
            wanted = generate_until(asked.prompt, asked.count, asked.stops)
            assert asked.output == wanted[: len(asked.output)]
            assert asked.stopped or asked.output == wanted
        for engine in (self.prefill, self.decode):
            cache = engine.scheduler.cache
            cache.flush()
            assert cache.slots.free == cache.slots.total, engine.role
