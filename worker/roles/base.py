"""Role: what prefill, decode and unified ranks do differently, as one small object each."""

from __future__ import annotations

from typing import Final, Protocol

from core.dump import RoomView
from core.handoffs import HandoffReport
from core.wire import ErrorKind, FinishReason, StreamError, TokenRequest
from worker.scheduler.scheduler import Progress, Step
from worker.sequence import Sequence

ROOM_IN_USE: Final = StreamError(
    kind=ErrorKind.INVALID, message="this room is in use by another request"
)


class Role(Protocol):
    """Given to the engine; called from its thread only.

    No call blocks, but for ``poll`` of a decode rank while it fences off a lost peer."""

    def admit(self, sequence: Sequence) -> None:
        """A new request, already opened in the streams."""
        ...

    def refuse(self, request: TokenRequest, kind: ErrorKind, message: str) -> None:
        """A request that cannot be taken; the router has been told, a peer may have to be."""
        ...

    def advance(self, progress: Progress) -> None:
        """A step computed a chunk or sampled a token for a running sequence."""
        ...

    def stepped(self, step: Step, took_s: float) -> None:
        """A step was run, in so many seconds; called before what it brought is booked."""
        ...

    def stop(self, sequence: Sequence, finish: FinishReason, error: StreamError | None) -> None:
        """End a sequence that has not ended; its pages go back once no peer uses them."""
        ...

    def poll(self, now: float) -> None:
        """Called at the top of every step: hear what the transport has to say."""
        ...

    def close(self) -> None:
        """Stop what runs beside the engine; called once, after the last step."""
        ...

    def on_peer(self, peer: str, data: bytes) -> None:
        """Raises TransferError when the message cannot be read."""
        ...

    def on_peer_lost(self, peer: str) -> None: ...

    def counts(self) -> dict[str, int]:
        """Handoff phase -> rooms."""
        ...

    def rooms(self) -> tuple[RoomView, ...]:
        """The handoffs that are not over, for a dump; without ages."""
        ...

    def transfers(self) -> HandoffReport | None:
        """What was counted of handoffs since start; None where there are none."""
        ...

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait outside the scheduler's queue."""
        ...

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Bytes of KV (sent, received) since start."""
        ...
