"""The gRPC server of one rank: routers and peers on one side, a step loop in a thread on the other.

The server runs on an asyncio loop. Whatever comes in is posted to the step loop as an event;
whatever a step produced is delivered from the step thread and hops to the loop once per step.
A router that reads too slowly, or not at all, loses its session; it never blocks a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import msgspec

from core.codec import Codec, to_rank_codec, to_router_codec
from core.dump import QueueView, RankDump
from core.errors import PreflightError
from core.lease import Health, Renewal
from core.rpc import events
from core.rpc.hop import Hop
from core.rpc.link import Context, Outbox, Pulse, converse
from core.rpc.peer import LinkPace, Parcel, PeerDesk
from core.rpc.service import (
    DUMP,
    LEASE,
    PEER,
    SERVER_OPTIONS,
    SERVICE,
    SESSION,
    STATUS,
    STOPPING,
)
from core.wire import (
    PROTOCOL_VERSION,
    Abort,
    Hello,
    Ping,
    RankStatus,
    StepReport,
    Submit,
    ToRank,
    ToRouter,
    Welcome,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

HELLO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """When a session or a link ends."""

    router_grace_s: float = 2.0  # a router whose session ended may come back within this
    heartbeat_s: float = 1.0  # from the event loop, also while a step takes long
    # Longer than a router waits for a rank: what a router loses with a rank goes on elsewhere, but
    # what a rank loses with a router ends for good. One that stands still for some seconds keeps
    # its streams; the price is that the rank computes for nobody, should it not come back.
    router_silence_s: float = 15.0
    outbox_bytes: int = 16 * 2**20  # reports one router has not read yet
    queues_timeout_s: float = 1.0  # a dump comes without queues where the step loop takes longer
    peer_pace: LinkPace = field(default_factory=LinkPace)


@dataclass(frozen=True, slots=True)
class _ToRouter:
    router: str
    report: StepReport


class RankServer:
    """Binds first, so that the rank's incarnation can name the endpoint, and serves later.

    ``bind``, ``start`` and ``stop`` run on one event loop; ``deliver``, ``deliver_peer`` and
    ``drop_peer`` may be called from any thread.
    """

    def __init__(
        self,
        limits: ServerLimits = ServerLimits(),
        on_renewal: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``on_renewal`` gets the supervisor of each renewal of the rank's lease."""
        self._limits = limits
        self._on_renewal = on_renewal
        self._loop = asyncio.get_running_loop()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._to_rank: Codec[ToRank] = to_rank_codec()
        self._to_router: Codec[ToRouter] = to_router_codec()
        self._status: Codec[RankStatus] = Codec(RankStatus)
        self._dump: Codec[RankDump] = Codec(RankDump)
        self._renewal: Codec[Renewal] = Codec(Renewal)
        self._health: Codec[Health] = Codec(Health)
        self._outboxes: dict[str, Outbox] = {}  # router -> its session
        self._graces: dict[str, asyncio.TimerHandle] = {}
        self._hop: Hop[_ToRouter | Parcel] = Hop(self._loop, self._forward)
        self._desk = PeerDesk(self._peer_message, self._peer_lost, limits.peer_pace)
        self._rank: events.StepPort | None = None

    def bind(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Take a port (0: any free one) and return "host:port". Raises PreflightError."""
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise PreflightError(f"cannot listen on {host}:{port}: {error}") from error
        return f"{host}:{bound}"

    async def start(self, rank: events.StepPort) -> None:
        """Serve ``rank``; its incarnation carries the endpoint that ``bind`` returned."""
        self._rank = rank
        handlers = {
            SESSION: grpc.stream_stream_rpc_method_handler(self._session),
            PEER: grpc.stream_stream_rpc_method_handler(self._peer),
            STATUS: grpc.unary_unary_rpc_method_handler(self._answer_status),
            DUMP: grpc.unary_unary_rpc_method_handler(self._answer_dump),
            LEASE: grpc.unary_unary_rpc_method_handler(self._answer_lease),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        await self._server.start()

    def deliver(self, router: str, report: StepReport) -> None:
        """Send one step's report to a router; dropped where its session has ended."""
        self._hop.put(_ToRouter(router, report))

    def deliver_peer(self, peer: str, data: bytes) -> None:
        """Send a message to a peer; dropped where PeerLost has been posted for it."""
        self._hop.put(Parcel(peer, data))

    def drop_peer(self, peer: str) -> None:
        """End a link whose peer makes no sense; PeerLost follows."""
        self._hop.put(Parcel(peer, None))

    async def stop(self, grace_s: float = 1.0) -> None:
        """End sessions and links, then the server. The step loop hears nothing of it."""
        self._rank = None
        self._hop.close()
        for outbox in self._outboxes.values():
            outbox.close(STOPPING)
        self._desk.close(STOPPING)
        await self._server.stop(grace_s)
        for timer in self._graces.values():
            timer.cancel()
        self._graces.clear()

    # --- from the step loop, on the event loop ------------------------------------------------

    def _forward(self, item: _ToRouter | Parcel) -> None:
        if isinstance(item, Parcel):
            self._desk.forward(item)
        elif item.router in self._outboxes:
            self._outboxes[item.router].send(self._to_router.encode(item.report))

    # --- to the step loop -----------------------------------------------------------------------

    def _post(self, event: events.RankEvent) -> None:
        if self._rank is not None:
            self._rank.post(event)

    def _peer_message(self, peer: str, data: bytes) -> None:
        self._post(events.PeerMessage(peer, data))

    def _peer_lost(self, peer: str) -> None:
        self._post(events.PeerLost(peer))

    def _router_lost(self, router: str) -> None:
        del self._graces[router]
        self._post(events.RouterLost(router))

    def _on_message(self, router: str, message: ToRank) -> None:
        match message:
            case Submit(request=request):
                self._post(events.Submitted(router, request))
            case Abort(rid=rid, done=done):
                self._post(events.Aborted(router, rid, done))
            case Ping():
                self._post(events.Pinged(router))
            case Hello():
                raise msgspec.ValidationError("a second Hello")

    # --- handlers -------------------------------------------------------------------------------

    async def _serving(self, context: Context) -> events.StepPort:
        if self._rank is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
        return self._rank

    async def _session(self, _: object, context: Context) -> None:
        rank = await self._serving(context)
        router = (await self._hello(context)).router
        await context.send_initial_metadata(())
        outbox = self._open(router)
        try:
            outbox.send(self._to_router.encode(Welcome(version=PROTOCOL_VERSION, info=rank.info)))
            reason = await converse(
                context,
                outbox,
                lambda frame: self._on_message(router, self._to_rank.decode(frame)),
                Pulse(self._limits.heartbeat_s, self._limits.router_silence_s),
            )
            log.info("session of router %s ended: %s", router, reason)
        finally:
            self._ended(router, outbox)
        await context.abort(grpc.StatusCode.ABORTED, f"session ended: {reason}")

    async def _hello(self, context: Context) -> Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame = await context.read()
            hello: ToRank | None = self._to_rank.decode(b"" if frame is grpc.aio.EOF else frame)
        except (TimeoutError, msgspec.MsgspecError):
            hello = None
        if not isinstance(hello, Hello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session starts with Hello")
        if hello.version != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the rank speaks version {PROTOCOL_VERSION} of the protocol and router"
                f" {hello.router} version {hello.version}: upgrade the older one",
            )
        return hello

    def _open(self, router: str) -> Outbox:
        if timer := self._graces.pop(router, None):
            timer.cancel()
        if earlier := self._outboxes.get(router):
            earlier.close("the same router opened another session")
        outbox = self._outboxes[router] = Outbox(self._limits.outbox_bytes)
        return outbox

    def _ended(self, router: str, outbox: Outbox) -> None:
        """Start the grace, unless a newer session of the same router is there."""
        if self._outboxes.get(router) is not outbox:
            return
        del self._outboxes[router]
        if self._rank is not None:
            self._graces[router] = self._loop.call_later(
                self._limits.router_grace_s, self._router_lost, router
            )

    async def _peer(self, _: object, context: Context) -> None:
        rank = await self._serving(context)
        await self._desk.serve(context, rank.info.incarnation)

    async def _answer_status(self, _: bytes, context: Context) -> bytes:
        """Ask the step loop: an answer proves that it still steps. The caller sets the deadline."""
        rank = await self._serving(context)
        answer: asyncio.Future[RankStatus] = self._loop.create_future()

        def reply(status: RankStatus) -> None:
            self._loop.call_soon_threadsafe(_settle, answer, status)

        rank.post(events.StatusAsked(reply))
        return self._status.encode(await answer)

    async def _answer_lease(self, frame: bytes, context: Context) -> bytes:
        """Answer without the step loop: its health is looked at, not asked for."""
        rank = await self._serving(context)
        try:
            renewal = self._renewal.decode(frame)
        except msgspec.MsgspecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a Renewal: {error}")
        if renewal.nonce != rank.info.incarnation.nonce:
            words = f"this is {rank.info.incarnation}, not #{renewal.nonce}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, words)
        self._on_renewal(renewal.supervisor)
        return self._health.encode(rank.health())

    async def _answer_dump(self, _: bytes, context: Context) -> bytes:
        """Answer in any case; a step loop that hangs has no queues to show."""
        rank = await self._serving(context)
        answer: asyncio.Future[QueueView] = self._loop.create_future()

        def reply(queues: QueueView) -> None:
            self._loop.call_soon_threadsafe(_settle, answer, queues)

        seen = rank.glance()  # before the step loop is disturbed
        rank.post(events.QueuesAsked(reply))
        timeout_s = self._limits.queues_timeout_s
        await asyncio.wait([answer], timeout=timeout_s)
        note = "" if answer.done() else f"the step loop did not show its queues in {timeout_s:g} s"
        queues = answer.result() if answer.done() else None
        return self._dump.encode(msgspec.structs.replace(seen, queues=queues, note=note))


def _settle(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():  # the caller's deadline may have passed
        answer.set_result(value)
