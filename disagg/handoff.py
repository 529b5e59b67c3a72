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

Outgoing, the prefill side of one room:

    UNCLAIMED ──Claimed──▶ SENDING ──last write done──▶ CLOSED
        │                  │ ▲   │
        │    a write fails │ │   │ Cancelled, Aborted, PeerLost, with a write in flight
        │                  ▼ │   ▼
        │              STALLED ▶ DRAINING ──write returned, engine renewed──▶ CLOSED
        └─ClaimTimeout, Aborted, Declined──▶ CLOSED        (at once, when nothing is in flight)

    STALLED: the peer was told of the failure and the own engine is being replaced. The peer
    fences and announces again (back to SENDING), once for each room; then it cancels.

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
    Cancelled,
    Claimed,
    ClaimTimeout,
    Computed,
    Corrupt,
    Declined,
    Fail,
    Fence,
    Fenced,
    IncomingAction,
    IncomingEvent,
    KeptHere,
    LastArrived,
    OutgoingAction,
    OutgoingEvent,
    PeerLost,
    QuietHeard,
    RefusedHeard,
    Release,
    ReleasePages,
    Renew,
    Renewed,
    Reserved,
    SendCancel,
    SendDeclined,
    SendDone,
    SendQuiet,
    SendRefused,
    StartDecoding,
    Write,
    WriteDone,
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


class OutgoingPhase(StrEnum):
    """Where a room stands on the prefill side."""

    UNCLAIMED = "unclaimed"
    SENDING = "sending"
    STALLED = "stalled"
    DRAINING = "draining"
    CLOSED = "closed"


OutgoingStep: TypeAlias = "tuple[Outgoing, tuple[OutgoingAction, ...]]"
Ending = Cancelled | Aborted | Declined | PeerLost
DECLINED = "the decode rank computes the prompt itself"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One room on the prefill side.

    0 ........ held ........ sent ........ upto ........ computed ........
      decode's   has landed    in flight     next write     not yet there
    """

    phase: OutgoingPhase = OutgoingPhase.UNCLAIMED
    generation: int = 0  # of the latest announcement
    computed: int = 0  # tokens
    last: bool = False  # ``computed`` is all there will be
    sent: int = 0  # tokens that have landed, counting those the peer held
    upto: int | None = None  # end of the write in flight
    written_under: int = 0  # generation of the latest write
    renewing: bool = False
    problem: str = ""  # of the latest write that failed
    ending: Ending | None = None  # why it drains
    told: bool = False  # the ending was told to the peer
    quiet: bool = True  # nothing of this room can land any more; of use once it is closed

    @property
    def over(self) -> bool:
        return self.phase is OutgoingPhase.CLOSED

    def on(self, event: OutgoingEvent) -> OutgoingStep:
        """The state after ``event``, and what to do about it, in order."""
        if isinstance(event, Computed):
            return self._computed(event)
        match self.phase:
            case OutgoingPhase.UNCLAIMED:
                return self._unclaimed(event)
            case OutgoingPhase.SENDING:
                return self._sending(event)
            case OutgoingPhase.STALLED:
                return self._stalled(event)
            case OutgoingPhase.DRAINING:
                return self._draining(event)
        return self, ()

    def _computed(self, event: Computed) -> OutgoingStep:
        if self.over or event.upto < self.computed or self.last:
            return self, ()
        grown = replace(self, computed=event.upto, last=event.last)
        return grown._next() if self.phase is OutgoingPhase.SENDING else (grown, ())

    def _next(self) -> OutgoingStep:
        """Go on sending: the next write, or the end, or wait for more."""
        if self.upto is not None:
            return self, ()
        if self.sent < self.computed:
            writing = replace(self, upto=self.computed, written_under=self.generation)
            return writing, (Write(self.sent, self.computed),)
        if self.last:
            return self._close(True, "", SendDone(self.generation))
        return self, ()

    def _close(self, ok: bool, message: str, *words: OutgoingAction) -> OutgoingStep:
        closed = replace(self, phase=OutgoingPhase.CLOSED)
        return closed, (*words, ReleasePages(ok, message))

    def _unclaimed(self, event: OutgoingEvent) -> OutgoingStep:
        match event:
            case Claimed(generation, held):
                claimed = replace(
                    self, phase=OutgoingPhase.SENDING, generation=generation, sent=held
                )
                return claimed._next()
            case Aborted(message=message):
                return replace(self, ending=event)._close(False, message)
            case Declined():
                return replace(self, ending=event)._close(False, DECLINED)
            case ClaimTimeout(message):
                return self._close(False, message)
        return self, ()

    def _reclaim(self, event: Claimed) -> Outgoing:
        """Take over a newer announcement. What has landed stays: the pages are the same."""
        return replace(self, generation=max(self.generation, event.generation))

    def _sending(self, event: OutgoingEvent) -> OutgoingStep:
        match event:
            case Claimed():
                return self._reclaim(event), ()
            case WriteDone(ok=True) if self.upto is not None:
                return replace(self, sent=self.upto, upto=None)._next()
            case WriteDone(ok=False) if self.upto is not None:
                return self._write_failed(event.problem)
            case Cancelled() | Aborted() | PeerLost():
                ending = replace(self, ending=event)
                if self.upto is None:
                    return ending._finish(())
                return replace(ending, phase=OutgoingPhase.DRAINING), ()
        return self, ()

    def _write_failed(self, problem: str) -> OutgoingStep:
        quiet = self.written_under < self.generation  # the peer fenced since: that is why it failed
        stalled = replace(
            self,
            phase=OutgoingPhase.STALLED,
            upto=None,
            renewing=True,
            quiet=quiet,
            problem=problem,
        )
        return stalled, (Renew(),) if quiet else (stalled._unquiet(), Renew())

    def _unquiet(self) -> SendRefused:
        """What the peer hears of a failed write, which may still land."""
        message = f"a KV write failed: {self.problem}" if self.problem else "a KV write failed"
        return SendRefused(self.generation, ErrorKind.UNAVAILABLE, message, False)

    def _stalled(self, event: OutgoingEvent) -> OutgoingStep:
        match event:
            case Claimed(generation=generation) if generation > self.generation:
                return replace(self._reclaim(event), quiet=True)._resume()
            case Renewed():
                return replace(self, renewing=False)._resume()
            case Cancelled() | Aborted() | PeerLost():
                # An unquiet room has told the peer already, when the write failed.
                ending = replace(self, phase=OutgoingPhase.DRAINING, ending=event)
                said, words = ending._say() if self.quiet else (replace(ending, told=True), ())
                return said._finish(words)
        return self, ()

    def _resume(self) -> OutgoingStep:
        """Send again once the peer has fenced and the own engine is new."""
        if self.renewing or not self.quiet:
            return self, ()
        return replace(self, phase=OutgoingPhase.SENDING)._next()

    def _draining(self, event: OutgoingEvent) -> OutgoingStep:
        match event:
            case WriteDone(ok, problem) if self.upto is not None:
                quiet = ok or self.written_under < self.generation
                returned = replace(self, upto=None, renewing=not ok, quiet=quiet, problem=problem)
                said, words = returned._say()
                return said._finish(words if ok else (*words, Renew()))
            case Renewed():
                return replace(self, renewing=False)._finish(())
            case Claimed(generation=generation) if generation > self.generation:
                reclaimed = replace(self._reclaim(event), quiet=True)
                if not self.told:
                    return reclaimed, ()
                return replace(reclaimed, told=False)._say()  # it takes no answer to an older one
            case PeerLost():
                return replace(self, ending=event), ()
        return self, ()

    def _say(self) -> OutgoingStep:
        """Tell the peer how the room ends."""
        told = replace(self, told=True)
        match self.ending:
            case Cancelled() if self.quiet:
                return told, (SendQuiet(),)
            case Cancelled():
                return told, (self._unquiet(),)
            case Aborted(kind, message):
                return told, (SendRefused(self.generation, kind, message, self.quiet),)
            case PeerLost(message):  # in case a new link exists and the peer missed the loss
                kind = ErrorKind.UNAVAILABLE
                return told, (SendRefused(self.generation, kind, message, self.quiet),)
        return told, ()

    def _finish(self, words: tuple[OutgoingAction, ...]) -> OutgoingStep:
        """Close when nothing is in flight, telling the peer first; else drain."""
        if self.upto is not None or self.renewing:
            return self, words
        if not self.told:
            said, more = self._say()
            return said._finish((*words, *more))
        return self._close(False, _reason(self.ending), *words)


def _reason(ending: Ending | None) -> str:
    match ending:
        case Aborted(message=message) | PeerLost(message):
            return message
    return "the decode rank cancelled"
