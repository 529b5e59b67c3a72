"""UnifiedRole: prefill and decode in one rank. The case in which no KV moves."""

from __future__ import annotations

from core.dump import RoomView
from core.handoffs import HandoffReport
from core.wire import ErrorKind, FinishReason, StreamError, TokenRequest
from worker.scheduler.scheduler import Progress, Scheduler, Step
from worker.sequence import Sequence, SequenceState
from worker.streams import Streams


class UnifiedRole:
    """Admits to the scheduler, emits every token, releases at the end."""

    def __init__(self, scheduler: Scheduler, streams: Streams, eos: frozenset[int]) -> None:
        self._scheduler = scheduler
        self._streams = streams
        self._eos = eos

    def admit(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)

    def refuse(self, request: TokenRequest, kind: ErrorKind, message: str) -> None:
        """No peer knows of the request."""

    def advance(self, progress: Progress) -> None:
        if progress.token is None:
            return
        sequence = progress.sequence
        finish = sequence.finish_reason(self._eos, self._scheduler.limits.context_len)
        self._streams.token(sequence, progress.logprob, finish)
        if finish is not None:
            self._leave(sequence)

    def stepped(self, step: Step, took_s: float) -> None:
        """No decision follows from it."""

    def stop(self, sequence: Sequence, finish: FinishReason, error: StreamError | None) -> None:
        self._streams.end(sequence, finish, error)
        self._leave(sequence)

    def poll(self, now: float) -> None:
        """Nothing to hear."""

    def close(self) -> None:
        """Nothing runs beside the engine."""

    def on_peer(self, peer: str, data: bytes) -> None:
        """A unified rank has no peers; a stray message is dropped."""

    def on_peer_lost(self, peer: str) -> None:
        """A unified rank has no peers."""

    def counts(self) -> dict[str, int]:
        return {}

    def rooms(self) -> tuple[RoomView, ...]:
        return ()

    def transfers(self) -> HandoffReport | None:
        return None

    @property
    def waiting(self) -> list[Sequence]:
        return []

    @property
    def kv_bytes(self) -> tuple[int, int]:
        return 0, 0

    def _leave(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._scheduler.cache.release(sequence)
        sequence.move(SequenceState.FINISHED)
        self._streams.forget(sequence)
