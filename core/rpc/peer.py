"""Links between ranks: ordered opaque frames both ways, one peer id for each life of a link.

The decode side opens links (``PeerLinks``), the prefill side answers on them (``PeerDesk``, part
of the RankServer). A link that broke or fell silent is lost once and for all: the next message to
the same rank opens another link under another id, so that late messages cannot be mixed up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import msgspec

from core.codec import Codec
from core.rpc.hop import Hop
from core.rpc.link import Context, Outbox, Pulse, complain, converse, in_order, is_beat
from core.rpc.service import CHANNEL_OPTIONS, PEER, STOPPING, path
from core.wire import PROTOCOL_VERSION, Incarnation

log = logging.getLogger(__name__)

OUTBOX_BYTES = 64 * 2**20  # of unwritten frames: a peer that is further behind is lost
HELLO_TIMEOUT_S = 5.0


class PeerHello(msgspec.Struct, frozen=True, kw_only=True):
    """First frame of a link."""

    version: int
    caller: str  # for logs
    target_nonce: str  # which incarnation the caller means: ports are used again


@dataclass(frozen=True, slots=True)
class LinkPace:
    """Seconds between heartbeats, and after which a link is lost on which none was answered."""

    heartbeat_s: float = 0.4
    silence_s: float = 5.0

    @classmethod
    def within(cls, silence_s: float) -> LinkPace:
        """For this time-out, with room for several heartbeats in it."""
        return cls(heartbeat_s=min(0.5, silence_s / 4), silence_s=silence_s)

    def pulse(self) -> Pulse:
        return Pulse(every_s=self.heartbeat_s, silence_s=self.silence_s)


OnMessage = Callable[[str, bytes], None]
OnLost = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Open:
    peer: str
    target: Incarnation


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message for one link, or the order to drop the link where ``data`` is None."""

    peer: str
    data: bytes | None

    def to(self, outboxes: dict[str, Outbox]) -> None:
        """Hand over to the link's outbox; a link that is lost has none any more."""
        if outbox := outboxes.get(self.peer):
            if self.data is None:
                outbox.close("dropped on this side")
            else:
                assert not is_beat(self.data), "messages are msgpack"
                outbox.send(self.data)


class PeerLinks:
    """Opens links to other ranks, lazily, one for each incarnation.

    Made and closed on the event loop. ``on_message(peer, data)`` and ``on_lost(peer)`` run there.
    """

    def __init__(
        self, self_id: str, on_message: OnMessage, on_lost: OnLost, *, pace: LinkPace = LinkPace()
    ) -> None:
        self._self_id = self_id
        self._on_message = on_message
        self._on_lost = on_lost
        self._pace = pace
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._peers: dict[Incarnation, str] = {}  # open or opening; guarded by the lock
        self._outboxes: dict[str, Outbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._hop: Hop[_Open | Parcel] = Hop(asyncio.get_running_loop(), self._forward)

    def open(self, target: Incarnation) -> str:
        """The id of the link to this incarnation, which is opened where there is none.

        From any thread, never blocks. If the link is lost, or cannot be made, ``on_lost`` is
        called with this id, and the next ``open`` returns another.
        """
        with self._lock:
            peer = self._peers.get(target)
            if peer is None:
                peer = self._peers[target] = f"out{next(self._numbers)}:{target.rank}"
                self._hop.put(_Open(peer, target))
        return peer

    def send(self, peer: str, data: bytes) -> None:
        """Queue a message; dropped where the link is lost. From any thread, never blocks."""
        self._hop.put(Parcel(peer, data))

    def drop(self, peer: str) -> None:
        """End a link whose peer makes no sense; ``on_lost`` follows. From any thread."""
        self._hop.put(Parcel(peer, None))

    async def close(self) -> None:
        """Drop all links without a word to ``on_lost``."""
        self._closing = True
        self._hop.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forward(self, item: _Open | Parcel) -> None:
        if isinstance(item, Parcel):
            item.to(self._outboxes)
            return
        outbox = self._outboxes[item.peer] = Outbox(OUTBOX_BYTES)
        outbox.send(self._hello(item.target))
        task = asyncio.create_task(self._run(item.peer, item.target, outbox))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(complain)

    def _hello(self, target: Incarnation) -> bytes:
        return msgspec.msgpack.encode(
            PeerHello(version=PROTOCOL_VERSION, caller=self._self_id, target_nonce=target.nonce)
        )

    async def _run(self, peer: str, target: Incarnation, outbox: Outbox) -> None:
        def on_frame(frame: bytes) -> None:
            self._on_message(peer, frame)

        channel = grpc.aio.insecure_channel(target.endpoint, options=CHANNEL_OPTIONS)
        try:
            async with channel:
                call = channel.stream_stream(path(PEER))()
                reason = await converse(call, outbox, on_frame, self._pace.pulse())
                call.cancel()
            _log_end(f"{peer} to {target}", reason)
        finally:  # whatever ended it: who waits for an answer must hear
            with self._lock:
                del self._peers[target]
            del self._outboxes[peer]
            if not self._closing:
                self._on_lost(peer)


class PeerDesk:
    """The answering end of links: a handler of the Peer method. Loop thread only."""

    def __init__(self, on_message: OnMessage, on_lost: OnLost, pace: LinkPace) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._pace = pace
        self._numbers = itertools.count(1)
        self._outboxes: dict[str, Outbox] = {}
        self._hello: Codec[PeerHello] = Codec(PeerHello)

    def forward(self, parcel: Parcel) -> None:
        """Carry out what the step loop asked for; nothing where ``on_lost`` has been called."""
        parcel.to(self._outboxes)

    def close(self, reason: str) -> None:
        for outbox in self._outboxes.values():
            outbox.close(reason)

    async def serve(self, context: Context, incarnation: Incarnation) -> None:
        """Run one link from its hello to its end."""
        hello = await self._greet(context, incarnation)
        await context.send_initial_metadata(())
        peer = f"in{next(self._numbers)}:{hello.caller}"
        outbox = self._outboxes[peer] = Outbox(OUTBOX_BYTES)

        def on_frame(frame: bytes) -> None:
            self._on_message(peer, frame)

        try:
            reason = await converse(context, outbox, on_frame, self._pace.pulse())
            _log_end(peer, reason)
        finally:
            del self._outboxes[peer]
            self._on_lost(peer)
        if in_order(reason):  # so that the other end can tell it from a loss
            await context.abort(grpc.StatusCode.ABORTED, STOPPING)

    async def _greet(self, context: Context, incarnation: Incarnation) -> PeerHello:
        refused = grpc.StatusCode.FAILED_PRECONDITION
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame = await context.read()
            hello = self._hello.decode(b"" if frame is grpc.aio.EOF else frame)
        except (TimeoutError, msgspec.MsgspecError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a link starts with PeerHello")
        if hello.version != PROTOCOL_VERSION:
            await context.abort(
                refused, f"this rank speaks version {PROTOCOL_VERSION}, not {hello.version}"
            )
        if hello.target_nonce != incarnation.nonce:
            await context.abort(refused, f"this is {incarnation}, not #{hello.target_nonce}")
        return hello


def _log_end(link: str, reason: str) -> None:
    """The end of a rank that was told to stop is no news."""
    level = logging.INFO if in_order(reason) else logging.WARNING
    log.log(level, "link %s is lost: %s", link, reason)
