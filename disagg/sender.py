"""The prefill side of the handoffs of one rank: push finished chunks, then the first token.

A thin shell over ``handoff.Outgoing``. Writes block, so they run on a few writer threads. The
thread on which one ends takes the room on at once, to its next write or to Done: the engine's may
be in the middle of a step, which takes as long as a chunk does. One lock guards it all, and
nothing blocks under it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from core.clock import RealClock
from core.dump import RoomView
from core.errors import RequestError, TransferError
from core.handoffs import HandoffCount, HandoffReport
from core.wire import ErrorKind, Int32Array
from disagg import checksum
from disagg.absent import Absent, refusal
from disagg.copier import Copier
from disagg.events import (
    Aborted,
    Cancelled,
    Claimed,
    ClaimTimeout,
    Computed,
    Declined,
    OutgoingAction,
    OutgoingEvent,
    PeerLost,
    ReleasePages,
    Renew,
    SendDone,
    SendQuiet,
    SendRefused,
    Write,
)
from disagg.geometry import PageGeometry
from disagg.lock import locked
from disagg.messages import (
    Announcement,
    Cancel,
    Declined as DeclinedMessage,
    Done,
    Moved,
    Quiet,
    Refused,
    ToDecode,
    to_decode_codec,
    to_prefill_codec,
)
from disagg.registers import Closed, Grave, OpenRoom, cause_of
from disagg.transfers import Transfers
from disagg.transport.base import KVTransport
from disagg.writers import Submit

log = logging.getLogger(__name__)


class Sender:
    """Every live room of a prefill rank.

    ``bases`` are the addresses of slot 0 of each region, in the order of the geometry; the
    transport must have them registered, and serve this sender alone. ``send`` must not block; it
    may drop what it cannot deliver, when it then reports the peer lost. ``send``, and ``wake``,
    which asks for a ``poll``, are called from writer threads, too. ``submit`` replaces these
    threads in tests. Its clock only measures.
    """

    def __init__(
        self,
        transport: KVTransport,
        geometry: PageGeometry,
        bases: Sequence[int],
        send: Callable[[str, bytes], None],
        wake: Callable[[], None],
        claim_timeout_s: float = 60.0,
        submit: Submit | None = None,
        check: checksum.Mode = "sample",
    ) -> None:
        assert len(bases) == len(geometry.slot_bytes), (bases, geometry)
        self._clock = RealClock()
        self._copier = Copier(transport, geometry, bases, self._clock, check)
        self._count = HandoffCount()
        self._send = send
        self._claim_timeout_s = claim_timeout_s
        self._wake = wake
        self._lock = threading.RLock()
        self._broken: BaseException | None = None  # on a writer thread; for the owner's
        self._encode = to_decode_codec().encode
        self._decode = to_prefill_codec().decode
        self._rooms: dict[int, OpenRoom] = {}
        self._transfers = Transfers(
            self._copier, self._rooms, self._count, self._clock, self._ended, submit
        )
        self._absent = Absent(self._say)
        self._closed: list[Closed] = []

    # --- the owner's side ---------------------------------------------------------------------

    @locked
    def open(self, room: int, rid: str, tokens: int) -> None:
        """Expect a decode rank to claim ``room``, for a prompt of ``tokens`` tokens.

        The rank may have done so already, or have cancelled: then Closed follows at once. Raises
        RequestError when the room is in use.
        """
        if room in self._rooms:
            raise RequestError(f"room {room} is already in use", param="room")
        if grave := self._absent.grave(room):
            self._closed.append(Closed(room, False, grave.message, grave.declined))
            return
        self._rooms[room] = OpenRoom(rid, tokens, opened_s=self._clock.now())
        if early := self._absent.opened(room):
            self._on_announcement(early.peer, early.message)

    def claimed(self, room: int) -> bool:
        """Whether a decode rank has reserved pages for this live room."""
        record = self._rooms.get(room)
        return record is not None and record.claim is not None

    @locked
    def push(self, room: int, slots: Int32Array) -> None:
        """KV of the first ``len(slots)`` tokens is complete in these token slots.

        ``slots`` names all of them each time. A slot named once stays untouched until Closed.
        A room that has closed is ignored.
        """
        if record := self._rooms.get(room):
            assert len(record.slots) <= len(slots) <= record.tokens, (room, len(slots))
            record.slots = np.array(slots, dtype=np.int32)
            self._feed(room, Computed(len(slots), last=False))

    @locked
    def finish(self, room: int, first_token: int) -> None:
        """All tokens were pushed, and this one was sampled after them."""
        if record := self._rooms.get(room):
            assert len(record.slots) == record.tokens, (room, len(record.slots), record.tokens)
            record.first_token = first_token
            self._feed(room, Computed(record.tokens, last=True))

    @locked
    def abort(self, room: int, kind: ErrorKind, message: str) -> None:
        """Give the room up and tell the decode rank why; works before ``open``, too."""
        if room in self._rooms:
            self._feed(room, Aborted(kind, message))
        else:
            self._absent.aborted(room, kind, message)

    @locked
    def poll(self, now: float) -> list[Closed]:
        """Take in passed deadlines; the rooms closed since the last call.

        Call it at least once a second. Raises TransferError when the engine could not be
        replaced after a failed write: the rank cannot go on and has to end.
        """
        if self._broken is not None:
            raise self._broken
        self._expire(now)
        closed, self._closed = self._closed, []
        return closed

    @locked
    def counts(self) -> dict[str, int]:
        """Live rooms by phase, and as "early" those announced but not yet opened."""
        counts = Counter(str(record.machine.phase) for record in self._rooms.values())
        counts["early"] = len(self._absent)
        return dict(+counts)

    @property
    def bytes_sent(self) -> int:
        return self._count.moved_bytes

    @locked
    def report(self) -> HandoffReport:
        """What was counted since start."""
        geometry = self._copier.geometry
        held = sum(geometry.pages(0, len(record.slots)) for record in self._rooms.values())
        return self._count.report(held)

    @locked
    def rooms(self) -> tuple[RoomView, ...]:
        """Every live room, and every early announcement, for a dump."""
        live = (record.view(room) for room, record in self._rooms.items())
        return (*live, *self._absent.views())

    def close(self) -> None:
        """Stop the writer threads after the writes in progress; does not wait for them."""
        self._transfers.close()

    # --- the peer's side ----------------------------------------------------------------------

    @locked
    def on_message(self, peer: str, data: bytes) -> None:
        """Take one message of a peer. Raises TransferError when it cannot be read.

        The caller then closes the link, and reports it lost.
        """
        try:
            message = self._decode(data)
        except msgspec.DecodeError as error:
            raise TransferError(f"peer {peer} sent what cannot be read: {error}") from error
        match message:
            case Announcement():
                self._on_announcement(peer, message)
            case Cancel(room=room) if record := self._rooms.get(room):
                if record.peer == peer:
                    self._feed(room, Cancelled())
            case Cancel(room=room):
                self._absent.cancelled(peer, room)
            case DeclinedMessage(room=room) if room in self._rooms:
                self._feed(room, Declined())  # nobody will claim it: who has done so does not
            case DeclinedMessage(room=room):
                self._absent.declined(room)
            case Moved(address=address):
                self._copier.reach(peer, address)

    @locked
    def on_peer_lost(self, peer: str, message: str = "the link to the decode rank ended") -> None:
        """The link is gone: its rooms close once nothing of them is in flight."""
        for room in [r for r, record in self._rooms.items() if record.peer == peer]:
            self._feed(room, PeerLost(message))
        self._copier.lose(peer)
        self._absent.lost(peer, message)

    def _on_announcement(self, peer: str, message: Announcement) -> None:
        record = self._rooms.get(message.room)
        if record is None:
            self._absent.announced(peer, message)
        elif record.claim is None:
            if problem := record.problem(message, self._copier.geometry):
                self._feed(message.room, Aborted(*problem))
                self._absent.announced(peer, message)
            else:
                self._claim(peer, record, message)
        elif record.peer != peer:
            words = "another decode rank has claimed this room"
            self._say(peer, refusal(message, ErrorKind.INVALID, words))
        elif message.generation > record.claim.generation:
            self._claim(peer, record, message)

    def _claim(self, peer: str, record: OpenRoom, message: Announcement) -> None:
        if record.claim is None:
            self._count.took("claim", self._clock.now() - record.opened_s)
            self._count.prompt_tokens += record.tokens
            self._count.delta_tokens += record.tokens - message.held
        else:
            self._count.retries += 1
        record.peer, record.claim = peer, message
        self._copier.reach(peer, message.address)
        log.info("room %d claimed by %s", message.room, peer, extra={"rid": record.rid})
        self._feed(message.room, Claimed(message.generation, message.held))

    # --- machinery ----------------------------------------------------------------------------

    def _ended(self) -> None:
        """A write or a renewal has ended, on this thread."""
        try:
            with self._lock:
                for room, event in self._transfers.events():
                    self._feed(room, event)
        except BaseException as error:
            self._broken = error
            raise
        finally:
            self._wake()

    def _feed(self, room: int, event: OutgoingEvent) -> None:
        record = self._rooms.get(room)
        if record is None:
            return
        record.machine, actions = record.machine.on(event)
        for action in actions:
            self._do(room, record, action)

    def _do(self, room: int, record: OpenRoom, action: OutgoingAction) -> None:
        message: ToDecode | None = None
        match action:
            case Write(start, stop):
                self._transfers.write(room, record, start, stop)
            case Renew():
                self._transfers.renew(room)
            case ReleasePages(ok, words):
                self._bury(room, record, ok=ok, message=words)
            case SendDone(generation):
                message = self._done(room, record, generation)
            case SendQuiet():
                message = Quiet(room=room)
            case SendRefused(generation, kind, words, quiet):
                message = Refused(
                    room=room, generation=generation, kind=kind, message=words, quiet=quiet
                )
        if message is not None:
            self._say(record.peer, message)

    def _say(self, peer: str, message: ToDecode) -> None:
        self._send(peer, self._encode(message))

    def _done(self, room: int, record: OpenRoom, generation: int) -> Done:
        if record.sending_s is not None:
            self._count.took("send", self._clock.now() - record.sending_s)
        self._count.checked += bool(record.checksums)
        return Done(
            room=room,
            generation=generation,
            first_token=record.first_token,
            checksums=record.checksums,
            whole=self._copier.checks_all,
        )

    def _bury(self, room: int, record: OpenRoom, *, ok: bool, message: str) -> None:
        del self._rooms[room]
        machine = record.machine
        ending = machine.ending
        declined = isinstance(ending, Declined)
        took_s = 0.0 if record.sending_s is None else self._clock.now() - record.sending_s
        self._closed.append(
            Closed(room, ok, message, declined, record.moved_bytes, record.writes, took_s)
        )
        if not ok and not declined:
            self._count.failed[cause_of(ending)] += 1
        kind = ending.kind if isinstance(ending, Aborted) else ErrorKind.UNAVAILABLE
        words = message or "the room was served"
        self._absent.bury(room, Grave(machine.generation, machine.quiet, kind, words, declined))

    def _expire(self, now: float) -> None:
        words = f"no decode rank claimed the room within {self._claim_timeout_s:g} s"
        for room, record in list(self._rooms.items()):
            if record.deadline is None:
                record.deadline = now + self._claim_timeout_s
            elif record.claim is None and now >= record.deadline:
                self._feed(room, ClaimTimeout(words))
        self._absent.expire(now, self._claim_timeout_s)
