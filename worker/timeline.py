"""Timeline: when what happened to one traced request in this rank. Recorded, and no more.

The step thread notes moments; spans are made of them by another thread, once the request is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from core.wire import FinishReason, StreamError


class Mark(StrEnum):
    """A moment in a request's life in one rank."""

    ARRIVED = "arrived"
    STARTED = "started"  # it is part of a step for the first time
    CHUNK = "first_chunk"  # and that was computed
    TOKEN = "first_token"  # that this rank said
    LOCAL = "local"  # decode: the prompt is computed here
    ANNOUNCED = "announced"  # decode: pages are reserved and the prefill rank told of them
    KV = "kv_arrived"  # decode: all of the prompt's is there
    ENDED = "ended"  # its stream
    CLOSED = "closed"  # prefill: its room; the transport is done with the pages


@dataclass(slots=True)
class Timeline:
    """Owned by the engine's thread until the request is over; then nobody changes it."""

    rid: str
    parent: str  # traceparent of the router's span
    now: Callable[[], float]  # seconds since the epoch
    at: dict[Mark, float] = field(default_factory=dict)
    # how it ended
    finish: FinishReason | None = None
    error: str = ""  # why it failed, or was stopped
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0  # said by this rank
    retractions: int = 0
    # of the handoff
    room_error: str = ""  # why the KV did not cross
    declined: bool = False  # prefill: the decode rank computes the prompt itself
    moved_bytes: int = 0
    writes: int = 0  # prefill
    sending_s: float = 0.0  # prefill: from the first write that could begin to the room's end

    def note(self, mark: Mark) -> None:
        """It happens now; only the first time counts."""
        self.at.setdefault(mark, self.now())

    def stop(self, why: str) -> None:
        """Its router stops it; where ``why`` is empty, because it has all that it wants."""
        if Mark.ENDED not in self.at:
            self.error = why

    def end(self, finish: FinishReason | None, error: StreamError | None) -> None:
        """Its stream ends; without a reason, the other leg goes on."""
        self.note(Mark.ENDED)
        self.finish = finish
        if error is not None:
            self.error = error.message
