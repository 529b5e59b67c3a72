"""The rooms of a Sender that are not open: announced before their request came, or closed."""

from __future__ import annotations

from collections.abc import Callable

from core.dump import RoomView
from core.wire import ErrorKind
from disagg.messages import Announcement, Quiet, Refused, ToDecode
from disagg.outgoing import DECLINED
from disagg.registers import EarlyClaim, EarlyClaims, Grave, Graveyard


class Absent:
    """Takes and answers what peers say of such rooms. ``send`` must not block."""

    def __init__(self, send: Callable[[str, ToDecode], None]) -> None:
        self._send = send
        self._early = EarlyClaims()
        self._graves = Graveyard()

    def __len__(self) -> int:
        """Announcements that wait for their request."""
        return len(self._early)

    def views(self) -> list[RoomView]:
        """What these are, for a dump."""
        return self._early.views()

    def grave(self, room: int) -> Grave | None:
        """How the room ended, if it is remembered."""
        return self._graves.get(room)

    def bury(self, room: int, grave: Grave) -> None:
        """An open room has closed."""
        self._graves.bury(room, grave)

    def opened(self, room: int) -> EarlyClaim | None:
        """Its request has come: the announcement that came before it, if any."""
        return self._early.pop(room)

    def announced(self, peer: str, message: Announcement) -> None:
        """Keep it for a room that is not open yet; refuse it for one that is closed."""
        if grave := self._graves.get(message.room):
            if message.generation > grave.generation:  # else it was answered, by the room's end
                grave.generation = message.generation
                self._send(peer, refusal(message, grave.kind, grave.message))
        elif not self._early.keep(peer, message):
            words = "too many rooms await their request here"
            grave = Grave(message.generation, True, ErrorKind.OVERLOADED, words)
            self._graves.bury(message.room, grave)
            self._send(peer, refusal(message, grave.kind, words))

    def cancelled(self, peer: str, room: int) -> None:
        """The decode rank does not want it; it hears when nothing of it can land any more."""
        grave = self._graves.get(room)
        if grave is None:
            self._early.pop(room)
            grave = Grave(0, True, ErrorKind.UNAVAILABLE, "the decode rank cancelled")
            self._graves.bury(room, grave)
        if grave.quiet:
            self._send(peer, Quiet(room=room))

    def declined(self, room: int) -> None:
        """The decode rank computes the prompt itself."""
        if room not in self._graves:
            self._early.pop(room)
            grave = Grave(0, True, ErrorKind.UNAVAILABLE, DECLINED, declined=True)
            self._graves.bury(room, grave)

    def aborted(self, room: int, kind: ErrorKind, message: str) -> None:
        """Its request has been given up before it came here."""
        if room not in self._graves:
            self._graves.bury(room, Grave(0, True, kind, message))
            if early := self._early.pop(room):
                self.announced(early.peer, early.message)

    def lost(self, peer: str, message: str) -> None:
        """The link is gone, and with it what it had announced."""
        for announcement in self._early.pop_peer(peer):
            kind = ErrorKind.UNAVAILABLE
            grave = Grave(announcement.generation, True, kind, message)
            self._graves.bury(announcement.room, grave)

    def expire(self, now: float, timeout_s: float) -> None:
        """Refuse the announcements whose request has not come within the time-out."""
        words = f"no request for the room came within {timeout_s:g} s"
        for early in self._early.pop_expired(now, timeout_s):
            self._graves.bury(early.message.room, Grave(0, True, ErrorKind.UNAVAILABLE, words))
            self.announced(early.peer, early.message)


def refusal(message: Announcement, kind: ErrorKind, words: str) -> Refused:
    """Turns an announcement down for which nothing was ever written."""
    return Refused(
        room=message.room, generation=message.generation, kind=kind, message=words, quiet=True
    )
