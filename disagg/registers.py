"""What a Sender knows of rooms: open, not opened yet, and closed. The last two are bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from core.dump import RoomView
from core.wire import ErrorKind, Int32Array
from disagg import geometry as layout
from disagg.events import Aborted, PeerLost
from disagg.geometry import PageGeometry
from disagg.messages import Announcement
from disagg.outgoing import Ending, Outgoing

MAX_EARLY = 1024
MAX_GRAVES = 16384


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a room: no source page of it is read any more. Nothing more comes."""

    room: int
    ok: bool  # the decode rank has all KV and the first token
    message: str  # why not
    declined: bool = False  # the decode rank computes the prompt itself: no failure
    # what it took; no part of what happened
    moved_bytes: int = field(default=0, compare=False)
    writes: int = field(default=0, compare=False)
    sending_s: float = field(default=0.0, compare=False)  # since it first could send; 0: never


@dataclass(slots=True)
class OpenRoom:
    """One room from its request to Closed."""

    rid: str
    tokens: int  # of the prompt
    deadline: float | None = None  # of the claim; set when the clock is first known
    peer: str = ""  # empty until claimed
    claim: Announcement | None = None
    machine: Outgoing = field(default_factory=Outgoing)
    slots: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    first_token: int = 0
    checksums: tuple[int, ...] = ()  # of the write that ended the prompt
    opened_s: float = 0.0
    sending_s: float | None = None  # when it first could send
    moved_bytes: int = 0
    writes: int = 0  # that succeeded

    def problem(
        self, message: Announcement, geometry: PageGeometry
    ) -> tuple[ErrorKind, str] | None:
        """Why the announced pages cannot be written, if so."""
        if difference := layout.mismatch(geometry, message.geometry):
            return ErrorKind.UNAVAILABLE, difference
        expected = self.tokens - message.held
        announced = len(message.pages) // 4
        if message.rid != self.rid:
            room = message.room
            words = f"room {room} is of {self.rid!r} here, of {message.rid!r} at the peer"
            return ErrorKind.INTERNAL, words
        if announced != expected or len(message.bases) != len(geometry.slot_bytes):
            words = f"{announced} pages announced for {expected} tokens of the prompt"
            return ErrorKind.INTERNAL, words
        return None

    def view(self, room: int) -> RoomView:
        machine = self.machine
        return RoomView(
            room=room,
            rid=self.rid,
            phase=machine.phase.value,
            peer=self.peer,
            sent=machine.sent,
            computed=machine.computed,
            total=self.tokens,
        )


@dataclass(slots=True)
class Grave:
    """A closed room, which no message may bring back."""

    generation: int  # of the last announcement that was answered
    quiet: bool  # nothing of it can land any more
    kind: ErrorKind
    message: str
    declined: bool = False  # by a decode rank that computes the prompt itself


@dataclass(slots=True)
class Graveyard:
    """The latest closed rooms."""

    limit: int = MAX_GRAVES
    _graves: dict[int, Grave] = field(default_factory=dict)

    def __contains__(self, room: int) -> bool:
        return room in self._graves

    def get(self, room: int) -> Grave | None:
        return self._graves.get(room)

    def bury(self, room: int, grave: Grave) -> None:
        """Remember ``room``, and forget the oldest when there are too many."""
        self._graves[room] = grave
        if len(self._graves) > self.limit:
            del self._graves[next(iter(self._graves))]


@dataclass(slots=True)
class EarlyClaim:
    """An announcement that overtook its request, and who sent it."""

    peer: str
    message: Announcement
    deadline: float | None = None  # set when the clock is first known


@dataclass(slots=True)
class EarlyClaims:
    """The announcements of rooms that are not open yet."""

    limit: int = MAX_EARLY
    _claims: dict[int, EarlyClaim] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._claims)

    def views(self) -> list[RoomView]:
        """What they are, for a dump."""
        return [
            RoomView(room=room, rid=claim.message.rid, phase="early", peer=claim.peer)
            for room, claim in self._claims.items()
        ]

    def keep(self, peer: str, message: Announcement) -> bool:
        """Keep the newest announcement of a room; False when there is no place for it."""
        known = self._claims.get(message.room)
        if known is not None:
            if known.peer == peer and known.message.generation < message.generation:
                known.message = message
            return True
        if len(self._claims) >= self.limit:
            return False
        self._claims[message.room] = EarlyClaim(peer, message)
        return True

    def pop(self, room: int) -> EarlyClaim | None:
        return self._claims.pop(room, None)

    def pop_peer(self, peer: str) -> list[Announcement]:
        """Take out what ``peer`` announced."""
        rooms = [room for room, claim in self._claims.items() if claim.peer == peer]
        return [self._claims.pop(room).message for room in rooms]

    def pop_expired(self, now: float, timeout_s: float) -> list[EarlyClaim]:
        """Take out what nobody opened in time, counted from the first call that saw it."""
        expired = []
        for room, claim in self._claims.items():
            if claim.deadline is None:
                claim.deadline = now + timeout_s
            elif now >= claim.deadline:
                expired.append(room)
        return [self._claims.pop(room) for room in expired]


def cause_of(ending: Ending | None) -> str:
    """Why a room failed, in a word for metrics."""
    match ending:
        case None:
            return "claim_timeout"
        case Aborted():
            return "aborted"
        case PeerLost():
            return "peer_lost"
    return "cancelled"
