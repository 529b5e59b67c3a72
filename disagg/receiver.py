"""The decode side of the handoffs of one rank: announce pages, watch for completion, release.

A thin shell over ``handoff.Incoming``, used by the engine's thread alone. It starts no thread and
decides nothing by a clock: what happens, happens inside a call.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from core.clock import Clock, RealClock
from core.dump import RoomView
from core.errors import RequestError, TransferError
from core.handoffs import HandoffCount, HandoffReport
from core.wire import ErrorKind, Int32Array, pack_ids, unpack_ids
from disagg import checksum
from disagg.events import (
    Aborted,
    Announce,
    Corrupt,
    Fail,
    Fence,
    Fenced,
    IncomingAction,
    IncomingEvent,
    KeptHere,
    LastArrived,
    PeerLost,
    QuietHeard,
    RefusedHeard,
    Release,
    Reserved,
    SendCancel,
    SendDeclined,
    StartDecoding,
)
from disagg.geometry import PageGeometry
from disagg.handoff import Incoming, IncomingPhase
from disagg.messages import (
    Announcement,
    Cancel,
    Declined,
    Done,
    Moved,
    Quiet,
    Refused,
    to_decode_codec,
    to_prefill_codec,
)
from disagg.transport.base import KVTransport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """All KV is in the room's pages, which are its owner's from now on. Nothing more comes."""

    room: int
    first_token: int  # the id that the prefill rank sampled
    took_s: float = field(default=0.0, compare=False)  # since the pages were announced
    moved_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The request's stream may end now. The pages stay held until Released."""

    room: int
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Released:
    """The pages of a failed room may be used again. Nothing more comes."""

    room: int


Outcome = Ready | Failed | Released


@dataclass(slots=True)
class _Room:
    rid: str
    peer: str
    held: int
    pages: bytes
    machine: Incoming
    announced_s: float


class Receiver:
    """Every live room of a decode rank.

    ``bases`` are the addresses of slot 0 of each region, in the order of the geometry; the
    transport must have them registered, and serve this receiver alone. ``send`` must not block;
    it may drop what it cannot deliver, when it then reports the peer lost. ``clock`` only measures.
    """

    def __init__(
        self,
        transport: KVTransport,
        geometry: PageGeometry,
        bases: Sequence[int],
        send: Callable[[str, bytes], None],
        clock: Clock | None = None,
    ) -> None:
        assert len(bases) == len(geometry.slot_bytes), (bases, geometry)
        self._clock = clock or RealClock()
        self._count = HandoffCount()
        self._transport = transport
        self._address = transport.address
        self._geometry = geometry
        self._bases = tuple(bases)
        self._exported = transport.exported(self._bases)
        self._send = send
        self._encode = to_prefill_codec().encode
        self._decode = to_decode_codec().decode
        self._rooms: dict[int, _Room] = {}
        self._reached: set[str] = set()  # peers that know the address, and may be connected to it
        self._outcomes: list[Outcome] = []
        self._fence_due = False

    def announce(self, room: int, rid: str, peer: str, held: int, slots: Int32Array) -> None:
        """Offer ``slots`` for the tokens from ``held`` on to the prefill rank behind ``peer``.

        The caller keeps the slots untouched until Ready or Released of this room. Raises
        RequestError when the room is in use.
        """
        self._count.prompt_tokens += held + len(slots)
        self._count.delta_tokens += len(slots)
        self._open(room, _Room(rid, peer, held, pack_ids(slots), Incoming(), self._clock.now()))
        self._feed(room, Reserved())

    def decline(self, room: int, rid: str, peer: str) -> None:
        """Tell the prefill rank behind ``peer`` that the prompt is computed here. Nothing follows.

        Raises RequestError when the room is in use.
        """
        self._open(room, _Room(rid, peer, 0, b"", Incoming(), self._clock.now()))
        self._feed(room, KeptHere())

    def _open(self, room: int, record: _Room) -> None:
        if room in self._rooms:
            raise RequestError(f"room {room} is already in use", param="room")
        self._rooms[room] = record

    def cancel(self, room: int, message: str, kind: ErrorKind = ErrorKind.UNAVAILABLE) -> None:
        """Give the room up: Failed with ``kind`` follows, then Released. Unknown rooms: no-op."""
        self._feed(room, Aborted(kind, message))

    def on_message(self, peer: str, data: bytes) -> None:
        """Take one message of a peer. Raises TransferError when it cannot be read.

        The caller then closes the link, and reports it lost.
        """
        try:
            message = self._decode(data)
        except msgspec.DecodeError as error:
            raise TransferError(f"peer {peer} sent what cannot be read: {error}") from error
        match message:
            case Done(room=room):
                self._from(peer, room, self._arrived(message))
            case Quiet(room=room):
                self._from(peer, room, QuietHeard())
            case Refused(room=room) if room not in self._rooms and not message.quiet:
                # It awaits a fence, which came before the room ended: set it free.
                self._send(peer, self._encode(Cancel(room=room)))
            case Refused(room=room):
                self._from(peer, room, _heard(message))

    def on_peer_lost(self, peer: str, message: str = "the link to the prefill rank ended") -> None:
        """The link is gone. Its rooms fail, and are released after a fence in the next poll."""
        self._reached.discard(peer)
        for room in [r for r, record in self._rooms.items() if record.peer == peer]:
            self._feed(room, PeerLost(message))

    def poll(self) -> list[Outcome]:
        """What happened since the last call. Blocks only when a fence is due.

        Raises TransferError when the fence fails: the rank cannot go on and has to end.
        """
        if self._fence_due or self._transport.lost:
            self._fence()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def counts(self) -> dict[str, int]:
        """Live rooms by phase."""
        return dict(Counter(str(record.machine.phase) for record in self._rooms.values()))

    @property
    def bytes_received(self) -> int:
        return self._count.moved_bytes

    @property
    def count(self) -> HandoffCount:
        """The counters, for the owner to add its own."""
        return self._count

    def report(self) -> HandoffReport:
        """What was counted since start."""
        ends = ((r.held, r.held + len(r.pages) // 4) for r in self._rooms.values())
        return self._count.report(sum(self._geometry.pages(*both) for both in ends))

    def rooms(self) -> tuple[RoomView, ...]:
        """Every live room, for a dump."""
        return tuple(
            RoomView(
                room=room,
                rid=record.rid,
                phase=record.machine.phase.value,
                peer=record.peer,
                total=record.held + len(record.pages) // 4,
            )
            for room, record in self._rooms.items()
        )

    def _fence(self) -> None:
        """Renew the transport, and tell every peer and room. The only place that may take long."""
        self._fence_due = False
        self._address = self._transport.renew()
        self._exported = self._transport.exported(self._bases)
        self._count.fences += 1
        for peer in self._reached:
            self._send(peer, self._encode(Moved(address=self._address)))
        for room in list(self._rooms):
            self._feed(room, Fenced())

    def _arrived(self, message: Done) -> LastArrived | Corrupt:
        """What a Done means, once the checksums that came with it were compared."""
        room, record = message.room, self._rooms.get(message.room)
        if message.checksums and record and record.machine.phase is IncomingPhase.ANNOUNCED:
            began = self._clock.now()
            slots = unpack_ids(record.pages)
            here = checksum.digests(self._geometry, self._bases, slots, room, whole=message.whole)
            self._count.took("check", self._clock.now() - began)
            self._count.checked += 1
            if here != message.checksums:
                words = checksum.difference(message.checksums, here)
                log.error("room %d: %s", room, words, extra={"rid": record.rid})
                return Corrupt(message.generation, words)
        return LastArrived(message.generation, message.first_token)

    def _from(self, peer: str, room: int, event: IncomingEvent) -> None:
        """Feed an event heard from ``peer``, unless the room is none of that peer's."""
        record = self._rooms.get(room)
        if record is not None and record.peer == peer:
            self._feed(room, event)

    def _feed(self, room: int, event: IncomingEvent) -> None:
        record = self._rooms.get(room)
        if record is None:
            return
        record.machine, actions = record.machine.on(event)
        if record.machine.over:
            del self._rooms[room]
        for action in actions:
            if isinstance(action, Fail):
                self._count.failed[_cause(event)] += 1
            self._do(room, record, action)

    def _do(self, room: int, record: _Room, action: IncomingAction) -> None:
        match action:
            case Announce(generation):
                self._count.retries += generation > 1
                self._reached.add(record.peer)
                self._send(record.peer, self._encode(self._announcement(room, record, generation)))
            case SendCancel():
                self._send(record.peer, self._encode(Cancel(room=room)))
            case SendDeclined():
                self._send(record.peer, self._encode(Declined(room=room)))
            case StartDecoding(first_token):
                took_s = self._clock.now() - record.announced_s
                self._count.took("ready", took_s)
                moved_bytes = len(record.pages) // 4 * self._geometry.token_bytes
                self._count.moved_bytes += moved_bytes
                self._outcomes.append(Ready(room, first_token, took_s, moved_bytes))
            case Fail(kind, message):
                self._outcomes.append(Failed(room, kind, message))
            case Release():
                self._outcomes.append(Released(room))
            case Fence():
                self._fence_due = True

    def _announcement(self, room: int, record: _Room, generation: int) -> Announcement:
        return Announcement(
            room=room,
            rid=record.rid,
            generation=generation,
            held=record.held,
            pages=record.pages,
            geometry=self._geometry,
            address=self._address,
            bases=self._exported,
        )


def _heard(message: Refused) -> RefusedHeard:
    return RefusedHeard(message.generation, message.kind, message.message, message.quiet)


def _cause(event: IncomingEvent) -> str:
    """Why a room failed, in a word for metrics."""
    match event:
        case PeerLost():
            return "peer_lost"
        case Corrupt():
            return "checksum"
        case RefusedHeard(quiet=False):
            return "write_failed"
        case Aborted():
            return "aborted"
    return "refused"
