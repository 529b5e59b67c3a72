"""RankHost: one rank, whole: engine, step loop thread, gRPC server and peer links.

Whoever runs an asyncio loop can host a rank: a Ray actor does on a cluster, a test in its own
process. The step loop never awaits and the asyncio loop never computes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from functools import partial

from core.clock import Clock, RealClock
from core.config import DisaggConfig, RankSpec
from core.rpc.events import PeerLost, PeerMessage, RankEvent
from core.rpc.peer import LinkPace, PeerLinks
from core.rpc.server import RankServer, ServerLimits
from core.tracing.tracer import CLOSE_S, Tracer, open_tracer
from core.wire import Incarnation, RankInfo, Role
from disagg.transport.base import KVTransport
from worker.attention.registry import ATTENTION
from worker.build import Built, build
from worker.engine import Engine
from worker.loop import StepLoop
from worker.spans import RankSpans
from worker.streams import Streams
from worker.watchdog import Watchdog

CRASH_S = 0.5  # a rank that dies keeps its sessions, and its successor, waiting for so long

OpenTransport = Callable[[RankSpec], KVTransport]


class RankHost:
    """Made by ``start``; ``info`` says where it listens."""

    def __init__(
        self,
        built: Built,
        server: RankServer,
        links: PeerLinks | None,
        loop: StepLoop,
        traces: _Traces | None,
    ) -> None:
        self._built = built
        self._server = server
        self._links = links
        self._loop = loop
        self._watch: asyncio.Task[None] | None = None
        self._traces = traces

    @property
    def info(self) -> RankInfo:
        return self._loop.info

    @classmethod
    async def start(
        cls,
        spec: RankSpec,
        on_crash: Callable[[], None],
        clock: Clock | None = None,
        transport: OpenTransport | None = None,
        on_renewal: Callable[[str], None] = lambda _: None,
    ) -> RankHost:
        """Load, listen and serve; returns when the rank can take requests.

        Raises OperatorError when the model or a library is at fault. ``on_crash`` is called from
        the step thread if it dies. ``transport`` overrides the configured one, for tests.
        ``on_renewal`` gets the supervisor of each renewal of the rank's lease.
        """
        server = RankServer(
            ServerLimits(peer_pace=LinkPace.within(spec.disagg.peer_timeout_s)), on_renewal
        )
        incarnation = Incarnation(
            rank=spec.rank, endpoint=server.bind(spec.host), nonce=secrets.token_hex(8)
        )
        wiring = _Wiring(server)
        opened = None if transport is None else partial(transport, spec)
        built = await asyncio.to_thread(build, spec, wiring, opened)
        info = _info(spec, incarnation, built)
        clock = clock or RealClock()
        traces = _Traces.open(spec, built.engine, clock)
        if traces is not None:
            on_crash = traces.before(on_crash)
        loop = StepLoop(built.engine, info, clock, server.deliver, on_crash)
        links = None
        if spec.role is Role.DECODE:
            links = PeerLinks(
                str(incarnation),
                wiring.heard,
                wiring.lost,
                pace=LinkPace.within(spec.disagg.peer_timeout_s),
            )
        wiring.connect(loop, links)
        loop.start()
        await server.start(loop)
        host = cls(built, server, links, loop, traces)
        host._watch_over(spec.group.watchdog_s)
        return host

    def _watch_over(self, limit_s: float) -> None:
        if limit_s:
            dog = Watchdog(limit_s, self._loop.recorder, self._loop.stack, self._loop.count_stuck)
            self._watch = asyncio.create_task(dog.run())

    async def stop(self) -> None:
        """Stop serving; live requests end with their sessions."""
        if self._watch is not None:
            self._watch.cancel()
        await self._server.stop()
        await asyncio.to_thread(self._loop.stop)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close, "the rank was stopped")
        if self._links is not None:
            await self._links.close()
        self._built.close()


class _Traces:
    """The tracer of a rank, and what is cut short when the rank ends."""

    def __init__(self, tracer: Tracer, spans: RankSpans, streams: Streams) -> None:
        self._tracer = tracer
        self._spans = spans
        self._streams = streams

    @classmethod
    def open(cls, spec: RankSpec, engine: Engine, clock: Clock) -> _Traces | None:
        """None where tracing is off. Raises OperatorError where it cannot be on."""
        tracer = open_tracer(spec.tracing, str(spec.rank), clock)
        if tracer is None:
            return None
        spans = engine.streams.spans = RankSpans(tracer, clock, spec.role)
        return cls(tracer, spans, engine.streams)

    def close(self, reason: str, timeout_s: float = CLOSE_S) -> None:
        """End what is open with this reason, once no step runs any more. Blocks."""
        self._spans.cut(list(self._streams.sequences()), reason)
        self._tracer.close(timeout_s)

    def before(self, on_crash: Callable[[], None]) -> Callable[[], None]:
        """``on_crash``, which may end the process, preceded by ``close``."""

        def crashed() -> None:
            self.close("the step loop of the rank died", CRASH_S)
            on_crash()

        return crashed


class _Wiring:
    """Joins the engine to its loop and its peers, which are made after it.

    A decode rank speaks over links that it opens, a prefill rank on those that it was called on.
    """

    def __init__(self, server: RankServer) -> None:
        self._server = server
        self._loop: StepLoop | None = None
        self._links: PeerLinks | None = None

    def connect(self, loop: StepLoop, links: PeerLinks | None) -> None:
        self._loop, self._links = loop, links

    def dial(self, target: Incarnation) -> str:
        assert self._links is not None, "only a decode rank opens links"
        return self._links.open(target)

    def send(self, peer: str, data: bytes) -> None:
        (self._links.send if self._links is not None else self._server.deliver_peer)(peer, data)

    def drop(self, peer: str) -> None:
        (self._links.drop if self._links is not None else self._server.drop_peer)(peer)

    def wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def heard(self, peer: str, data: bytes) -> None:
        self._post(PeerMessage(peer, data))

    def lost(self, peer: str) -> None:
        self._post(PeerLost(peer))

    def _post(self, event: RankEvent) -> None:
        if self._loop is not None:
            self._loop.post(event)


def _info(spec: RankSpec, incarnation: Incarnation, built: Built) -> RankInfo:
    return RankInfo(
        incarnation=incarnation,
        role=spec.role,
        model=spec.served_name,
        context_len=spec.context_len,
        total_pages=spec.group.kv_tokens // spec.group.page_size,
        page_size=spec.group.page_size,
        kv_bytes_per_token=built.bytes_per_token,
        dtype=spec.dtype,
        attention=ATTENTION.resolve(spec.group.attention),
        threads=spec.group.threads,
        pid=os.getpid(),
        transport="" if built.transport is None else _words(spec.disagg),
    )


def _words(disagg: DisaggConfig) -> str:
    return f"{disagg.transport} {disagg.protocol}"
