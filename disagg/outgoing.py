"""The prefill side of a handoff as a pure state machine; the decode side, and the law: handoff.py.

    UNCLAIMED ──Claimed──▶ SENDING ──last write done──▶ CLOSED
        │                  │ ▲   │
        │    a write fails │ │   │ Cancelled, Aborted, PeerLost, with a write in flight
        │                  ▼ │   ▼
        │              STALLED ▶ DRAINING ──write returned, engine renewed──▶ CLOSED
        └─ClaimTimeout, Aborted, Declined──▶ CLOSED        (at once, when nothing is in flight)

    STALLED: the peer was told of the failure and the own engine is being replaced. The peer
    fences and announces again (back to SENDING), once for each room; then it cancels.

Up to two writes are in flight, so that the second is under way while the end of the first still
travels. What follows from a write that failed waits for the other one to return; nothing of the two
counts as landed then, and both are sent again. Late, duplicate and unexpected events return the
state unchanged and no action.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from core.wire import ErrorKind
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
    Renewed,
    SendDone,
    SendQuiet,
    SendRefused,
    Write,
    WriteDone,
)

MOST_WRITES = 2  # of a room at the same time


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
    upto: int | None = None  # end of the writes in flight
    flying: int = 0  # writes in flight, all of the same generation
    failed: WriteDone | None = None  # one of two has, and the other is in flight
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
        if isinstance(event, WriteDone):
            return self._returned(event)
        return self._in_phase(event)

    def _in_phase(self, event: OutgoingEvent) -> OutgoingStep:
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

    def _returned(self, event: WriteDone) -> OutgoingStep:
        """One of the writes in flight has."""
        if not self.flying:
            return self, ()
        failed = self.failed or (None if event.ok else event)
        rest = replace(self, flying=self.flying - 1, failed=failed)
        if rest.flying:
            return rest._next() if self.phase is OutgoingPhase.SENDING else (rest, ())
        return replace(rest, failed=None)._in_phase(failed or event)

    def _next(self) -> OutgoingStep:
        """Go on sending: the next write, or the end, or wait for more."""
        if self.flying and not self._may_add():
            return self, ()
        start = self.sent if self.upto is None else self.upto
        if start < self.computed:
            under = self.generation
            writing = replace(self, upto=self.computed, flying=self.flying + 1, written_under=under)
            return writing, (Write(start, self.computed),)
        if self.last and not self.flying:
            return self._close(True, "", SendDone(self.generation))
        return self, ()

    def _may_add(self) -> bool:
        """Whether another write may join those in flight."""
        same = self.written_under == self.generation
        return self.flying < MOST_WRITES and self.failed is None and same

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
