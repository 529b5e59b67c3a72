"""The life of one KV handoff, as two pure state machines: an event in, a new state and actions out.

The decode rank owns pages that the prefill rank writes. The one law: a page that a peer may still
write is never released because of an error code or because time has passed. It is released on the
peer's word (Done, Quiet, or a Refused that says quiet), or after the decode rank has fenced its
transport, which lets nothing more land. On the other side a page that a failed write may still
read is released only after the prefill rank has renewed its own engine.

Incoming, the decode side of one room:

    WAITING ──KeptHere──▶ LOCAL      (the peer is told that its part is not needed)
       │
       └────Reserved────▶ ANNOUNCED ──LastArrived──▶ READY
                            │  ▲ │                              Fenced while ANNOUNCED (for another
                            │  └─┘ Fenced: announce again       room's sake): announce again with
               Aborted ┌────┴────┐ PeerLost, second unquiet     a higher generation
                       ▼         ▼ Refused (the first one asks for a fence, and stays)
               CANCELLING ────▶ FENCING      CANCELLING ends with any of Quiet, LastArrived,
                       │         │           quiet Refused, Fenced; FENCING with Fenced alone.
                       ▼         ▼           A quiet Refused or Corrupt ends ANNOUNCED at once.
                       RELEASED ◀┘

Outgoing, the prefill side of one room: outgoing.py.

Late, duplicate and unexpected events return the state unchanged and no action.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from core.wire import ErrorKind
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


class IncomingPhase(StrEnum):
    """Where a room stands on the decode side."""

    WAITING = "waiting"
    LOCAL = "local"
    ANNOUNCED = "announced"
    READY = "ready"
    CANCELLING = "cancelling"
    FENCING = "fencing"
    RELEASED = "released"


IncomingStep: TypeAlias = "tuple[Incoming, tuple[IncomingAction, ...]]"


@dataclass(frozen=True, slots=True)
class Incoming:
    """One room on the decode side."""

    phase: IncomingPhase = IncomingPhase.WAITING
    generation: int = 0
    failed: int = 0  # generation of the first write that failed
    cause: str = ""  # why it did

    @property
    def over(self) -> bool:
        return self.phase in (IncomingPhase.LOCAL, IncomingPhase.READY, IncomingPhase.RELEASED)

    def on(self, event: IncomingEvent) -> IncomingStep:
        """The state after ``event``, and what to do about it, in order."""
        match self.phase:
            case IncomingPhase.WAITING:
                return self._waiting(event)
            case IncomingPhase.ANNOUNCED:
                return self._announced(event)
            case IncomingPhase.CANCELLING:
                return self._cancelling(event)
            case IncomingPhase.FENCING:
                return self._fencing(event)
        return self, ()

    def _to(self, phase: IncomingPhase) -> Incoming:
        return replace(self, phase=phase)

    def _announce(self) -> IncomingStep:
        generation = self.generation + 1
        announced = replace(self, phase=IncomingPhase.ANNOUNCED, generation=generation)
        return announced, (Announce(generation),)

    def _fail(self, kind: ErrorKind, message: str) -> Fail:
        """What ends the request; what went wrong first is what is to be mended."""
        return Fail(kind, f"{self.cause}; then {message}" if self.failed else message)

    def _waiting(self, event: IncomingEvent) -> IncomingStep:
        match event:
            case Reserved():
                return self._announce()
            case KeptHere():
                return self._to(IncomingPhase.LOCAL), (SendDeclined(),)
            case Aborted(kind, message):  # nobody knows the pages yet
                return self._to(IncomingPhase.RELEASED), (Fail(kind, message), Release())
        return self, ()

    def _announced(self, event: IncomingEvent) -> IncomingStep:
        after: IncomingStep = (self, ())
        match event:
            case LastArrived(generation, first_token) if generation <= self.generation:
                # An older generation is as good: its writes had landed before the fence.
                after = self._to(IncomingPhase.READY), (StartDecoding(first_token),)
            case Corrupt(generation, message) if generation <= self.generation:
                after = self._refused(ErrorKind.UNAVAILABLE, message)
            case RefusedHeard(generation, kind, message, True) if generation <= self.generation:
                after = self._refused(kind, message)
            case RefusedHeard(generation, kind, message, False) if generation == self.generation:
                after = self._write_failed(kind, message)
            case QuietHeard():
                message = "the prefill rank dropped the request"
                after = self._refused(ErrorKind.UNAVAILABLE, message)
            case PeerLost(message):
                fail = self._fail(ErrorKind.UNAVAILABLE, message)
                after = self._to(IncomingPhase.FENCING), (fail, Fence())
            case Aborted(kind, message):
                after = self._to(IncomingPhase.CANCELLING), (SendCancel(), Fail(kind, message))
            case Fenced():
                after = self._announce()
        return after

    def _refused(self, kind: ErrorKind, message: str) -> IncomingStep:
        return self._to(IncomingPhase.RELEASED), (self._fail(kind, message), Release())

    def _write_failed(self, kind: ErrorKind, message: str) -> IncomingStep:
        """Try once more, on fresh engines on both sides. Of the latest announcement: to an older
        one a fence came since, and the peer answers the new one."""
        if self.failed == self.generation:
            return self, ()  # said twice; the fence is due
        if not self.failed:
            return replace(self, failed=self.generation, cause=message), (Fence(),)
        fail = self._fail(kind, message)
        return self._to(IncomingPhase.FENCING), (SendCancel(), fail, Fence())

    def _cancelling(self, event: IncomingEvent) -> IncomingStep:
        match event:
            case QuietHeard() | LastArrived() | Corrupt() | RefusedHeard(quiet=True) | Fenced():
                return self._to(IncomingPhase.RELEASED), (Release(),)
            case RefusedHeard(generation=generation) if generation == self.generation:
                return self._to(IncomingPhase.FENCING), (Fence(),)
            case PeerLost():
                return self._to(IncomingPhase.FENCING), (Fence(),)
        return self, ()

    def _fencing(self, event: IncomingEvent) -> IncomingStep:
        match event:
            case Fenced():
                return self._to(IncomingPhase.RELEASED), (Release(),)
            case RefusedHeard(quiet=False):  # over a new link: it awaits a word of ours
                return self, (SendCancel(),)
        return self, ()
