"""WorkerClient over gRPC: one multiplexed session with one incarnation of a rank.

The session lives once. When it breaks, falls silent or is closed, all its streams raise RankLost;
whoever wants the rank back opens another one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec

from core.codec import Codec, to_rank_codec, to_router_codec
from core.dump import RankDump
from core.errors import RankLost
from core.handoffs import HandoffReport
from core.inbox import Inbox
from core.rpc.link import Outbox, Pulse, complain, converse, explain, is_beat
from core.rpc.service import CHANNEL_OPTIONS, DUMP, SESSION, STATUS, path
from core.wire import (
    PROTOCOL_VERSION,
    Abort,
    Hello,
    Incarnation,
    LoadReport,
    Ping,
    RankInfo,
    RankStatus,
    StepReport,
    Submit,
    TokenChunk,
    TokenRequest,
    ToRank,
    ToRouter,
    Welcome,
)

OUTBOX_BYTES = 256 * 2**20  # a rank that has not read this much is lost


@dataclass(frozen=True, slots=True)
class SessionPace:
    """Seconds."""

    connect_timeout_s: float = 5.0
    ping_s: float = 1.0  # between pings, each with a heartbeat
    rank_timeout_s: float = 5.0  # a rank that answered no heartbeat of the last so long is lost
    status_timeout_s: float = 5.0

    @classmethod
    def within(cls, rank_timeout_s: float) -> SessionPace:
        """For this time-out, with room for several heartbeats in it."""
        return cls(ping_s=min(1.0, rank_timeout_s / 4), rank_timeout_s=rank_timeout_s)


class RankClient:
    """Implements core.ports.WorkerClient. Made by ``connect``; one event loop only."""

    def __init__(
        self,
        incarnation: Incarnation,
        info: RankInfo,
        wires: tuple[grpc.aio.Channel, Any],  # opaque: the session's grpc.aio call
        pace: SessionPace,
        on_lost: Callable[[], None],
    ) -> None:
        self.incarnation = incarnation
        self._info = info
        self._channel, self._call = wires
        self._pace = pace
        self._on_lost = on_lost
        self._load = LoadReport()
        self._transfers: HandoffReport | None = None
        self._lost: str | None = None
        self._streams: dict[str, Inbox[TokenChunk | None]] = {}
        self._to_rank: Codec[ToRank] = to_rank_codec()
        self._to_router: Codec[ToRouter] = to_router_codec()
        self._status: Codec[RankStatus] = Codec(RankStatus)
        self._outbox = Outbox(OUTBOX_BYTES)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(complain)

    @classmethod
    async def connect(
        cls,
        incarnation: Incarnation,
        router_id: str,
        *,
        pace: SessionPace = SessionPace(),
        on_lost: Callable[[], None] = lambda: None,
    ) -> RankClient:
        """Open a session; raises RankLost where that incarnation does not answer in time.

        ``on_lost`` is called once when the session ends by itself, not by ``close``.
        """
        channel = grpc.aio.insecure_channel(incarnation.endpoint, options=CHANNEL_OPTIONS)
        try:
            async with asyncio.timeout(pace.connect_timeout_s):
                call = channel.stream_stream(path(SESSION))()
                info, load = await _greet(call, incarnation, router_id)
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                raise RankLost(f"{incarnation} did not answer in time") from error
            if isinstance(error, (grpc.RpcError, grpc.aio.BaseError, msgspec.MsgspecError)):
                raise RankLost(f"{incarnation}: {explain(error)}") from error
            raise
        client = cls(incarnation, info, (channel, call), pace, on_lost)
        client._load = load
        return client

    @property
    def info(self) -> RankInfo:
        return self._info

    @property
    def load(self) -> LoadReport:
        return self._load

    @property
    def transfers(self) -> HandoffReport | None:
        return self._transfers

    @property
    def alive(self) -> bool:
        return self._lost is None

    @property
    def lost(self) -> str:
        return self._lost or ""

    async def stream(self, request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        """See core.ports.WorkerClient. The request is sent when the first chunk is asked for."""
        rid = request.rid
        if self._lost is not None:
            raise RankLost(f"{self.incarnation}: {self._lost}")
        assert rid not in self._streams, f"two streams with the id {rid}"
        inbox = self._streams[rid] = Inbox()
        self._send(Submit(request=request))
        ended = False
        try:
            while True:
                for chunk in await inbox.take():
                    if chunk is None:
                        raise RankLost(f"{self.incarnation}: {self._lost}")
                    ended = chunk.last or chunk.finish is not None
                    yield chunk
                    if ended:
                        return
        finally:
            if self._streams.pop(rid, None) is not None and not ended:
                self.abort(rid)

    def abort(self, rid: str, *, done: bool = False) -> None:
        """See core.ports.WorkerClient. A stream of it that is open brings no more."""
        self._streams.pop(rid, None)
        self._send(Abort(rid=rid, done=done))

    async def status(self) -> RankStatus:
        """Ask the step loop how it is; raises RankLost without an answer in time."""
        ask = self._channel.unary_unary(path(STATUS))
        try:
            return self._status.decode(await ask(b"", timeout=self._pace.status_timeout_s))
        except (grpc.RpcError, grpc.aio.BaseError, msgspec.MsgspecError) as error:
            raise RankLost(f"{self.incarnation} gave no status: {explain(error)}") from error
        except asyncio.CancelledError:
            if self._lost is None or _cancelled():
                raise
            # gRPC's way to say that the channel was closed meanwhile
            raise RankLost(f"{self.incarnation}: {self._lost}") from None

    async def close(self) -> None:
        """End the session; streams still open raise RankLost."""
        self._end("the session was closed")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def _send(self, message: ToRank) -> None:
        if self._lost is None:
            self._outbox.send(self._to_rank.encode(message))

    async def _run(self) -> None:
        pace = self._pace
        pulse = Pulse(
            every_s=pace.ping_s,
            silence_s=pace.rank_timeout_s,
            on_beat=lambda: self._send(Ping()),
        )
        reason = "a defect of this router ended it"
        try:
            reason = await converse(self._call, self._outbox, self._on_frame, pulse)
        finally:  # whatever ended it: streams must not wait for what does not come
            closed = self._lost is not None
            self._end(reason)
            self._call.cancel()
            if not closed:
                self._on_lost()

    def _on_frame(self, frame: bytes) -> None:
        report = self._to_router.decode(frame)
        if not isinstance(report, StepReport):
            raise msgspec.ValidationError("a second Welcome")
        self._load = report.load
        self._transfers = report.transfers or self._transfers
        for chunk in report.chunks:
            if stream := self._streams.get(chunk.rid):
                stream.put(chunk)

    def _end(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            for stream in self._streams.values():
                stream.put(None)


def _cancelled() -> bool:
    """Whether somebody wants this task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def ask_dump(incarnation: Incarnation, timeout_s: float = 3.0) -> RankDump:
    """What a rank is doing; without a session, because a rank whose steps hang has none.

    Raises RankLost where nobody, or another incarnation, answers in time.
    """
    try:
        async with grpc.aio.insecure_channel(
            incarnation.endpoint, options=CHANNEL_OPTIONS
        ) as channel:
            answer = await channel.unary_unary(path(DUMP))(b"", timeout=timeout_s)
        dump = Codec[RankDump](RankDump).decode(answer)
    except (grpc.RpcError, grpc.aio.BaseError, msgspec.MsgspecError) as error:
        raise RankLost(f"{incarnation} gave no dump: {explain(error)}") from error
    if dump.incarnation.nonce != incarnation.nonce:
        raise RankLost(f"looked for {incarnation} and found {dump.incarnation}")
    return dump


async def _greet(
    call: Any, incarnation: Incarnation, router_id: str
) -> tuple[RankInfo, LoadReport]:
    """Hello, Welcome, and a first report; raises RankLost where another incarnation answers.

    The report proves that the rank steps: its server says Welcome even while a step hangs.
    """
    encode = to_rank_codec().encode
    await call.write(encode(Hello(version=PROTOCOL_VERSION, router=router_id)))
    await call.write(encode(Ping()))
    welcome, report = await _read(call, incarnation), await _read(call, incarnation)
    if not isinstance(welcome, Welcome) or not isinstance(report, StepReport):
        raise RankLost(f"{incarnation} did not start with Welcome and a report")
    found = welcome.info.incarnation
    if found.nonce != incarnation.nonce:
        raise RankLost(f"looked for {incarnation} and found {found}")
    return welcome.info, report.load


async def _read(call: Any, incarnation: Incarnation) -> ToRouter:
    frame = await call.read()
    while frame is not grpc.aio.EOF and is_beat(frame):  # answered once the session runs
        frame = await call.read()
    if frame is grpc.aio.EOF:
        raise RankLost(f"{incarnation} ended the session at once")
    return to_router_codec().decode(frame)


class Connector:
    """Opens sessions for one router; what router.replicas.Replicas asks for.

    Every session has a router id of its own: what an earlier session left behind on a rank is
    aborted after the grace even though the same router is back.
    """

    def __init__(self, router_id: str, pace: SessionPace = SessionPace()) -> None:
        self._router_id = router_id
        self._pace = pace
        self._numbers = itertools.count(1)

    async def __call__(self, incarnation: Incarnation, on_lost: Callable[[], None]) -> RankClient:
        """Raises RankLost where the incarnation does not answer."""
        router = f"{self._router_id}.{next(self._numbers)}"
        return await RankClient.connect(incarnation, router, pace=self._pace, on_lost=on_lost)
