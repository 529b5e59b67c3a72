"""PrefillRole: computes prompts, emits the first token, hands the KV over.

A room's pages stay locked until the sender says Closed: until then the transport may read them.
"""

from __future__ import annotations

import logging

from core.dump import RoomView
from core.handoffs import HandoffReport
from core.wire import ErrorKind, FinishReason, StreamError, TokenRequest
from disagg.registers import Closed
from disagg.sender import Sender
from worker.roles.base import ROOM_IN_USE
from worker.scheduler.scheduler import Progress, Scheduler, Step
from worker.sequence import NO_ROW, Sequence, SequenceState
from worker.streams import Streams
from worker.timeline import Mark, Timeline

log = logging.getLogger(__name__)


class PrefillRole:
    """Pushes each finished chunk while the next one is computed."""

    def __init__(
        self, scheduler: Scheduler, streams: Streams, sender: Sender, eos: frozenset[int]
    ) -> None:
        self._scheduler = scheduler
        self._streams = streams
        self._sender = sender
        self._eos = eos
        self._rooms: dict[int, Sequence] = {}
        cache = scheduler.cache
        # Optimistic prefill: prompts may be computed before a decode rank has claimed them, but
        # any claimed request must still fit beside them, or both sides could wait for each other.
        total, longest = cache.slots.total, cache.rounded(scheduler.limits.context_len)
        self._unclaimed_slots = min(total // 2, total - longest)
        self._unclaimed_rows = cache.table.rows // 2
        self._unclaimed = (0, 0)  # slots and rows taken so, counted by poll and kept by the gate
        scheduler.admission.gate = self._may_start
        scheduler.first_token_only = True

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether admission may start the sequence now; a yes counts as started."""
        if single_token(sequence) or self._sender.claimed(sequence.room):
            return True
        slots, rows = self._unclaimed
        slots += self._scheduler.cache.rounded(sequence.length)
        if slots > self._unclaimed_slots or rows >= self._unclaimed_rows:
            return False
        self._unclaimed = (slots, rows + 1)
        return True

    def admit(self, sequence: Sequence) -> None:
        if single_token(sequence):
            self._scheduler.add(sequence)
        elif sequence.room in self._rooms:
            self._streams.end(sequence, FinishReason.ERROR, ROOM_IN_USE)
            self._release(sequence)
        else:
            self._rooms[sequence.room] = sequence
            self._sender.open(sequence.room, sequence.rid, sequence.length)
            self._scheduler.add(sequence)

    def refuse(self, request: TokenRequest, kind: ErrorKind, message: str) -> None:
        room = request.route.room
        if room not in self._rooms:
            self._sender.abort(room, kind, message)

    def advance(self, progress: Progress) -> None:
        sequence = progress.sequence
        if sequence.room not in self._rooms:
            self._advance_alone(progress)
            return
        # A page that is not full yet may still be replaced by the tree's; one being sent must not.
        upto = sequence.shared_len if progress.token is None else sequence.computed_len
        if upto:
            slots = self._scheduler.cache.table.read(sequence.row, 0, upto)
            self._sender.push(sequence.room, slots)
        if progress.token is None:
            return
        finish = sequence.finish_reason(self._eos, self._scheduler.limits.context_len)
        self._streams.token(sequence, progress.logprob, finish, last=True)
        self._scheduler.remove(sequence)
        sequence.move(SequenceState.SENDING)
        self._sender.finish(sequence.room, progress.token)

    def stepped(self, step: Step, took_s: float) -> None:
        """No decision follows from it."""

    def stop(self, sequence: Sequence, finish: FinishReason, error: StreamError | None) -> None:
        if sequence.state is not SequenceState.SENDING:  # else its last chunk is out already
            self._streams.end(sequence, finish, error)
            self._scheduler.remove(sequence)
        if sequence.room not in self._rooms:
            self._release(sequence)
            return
        sequence.move(SequenceState.CLOSING)
        kind, message = (error.kind, error.message) if error else _GONE
        self._sender.abort(sequence.room, kind, message)

    def poll(self, now: float) -> None:
        for closed in self._sender.poll(now):
            sequence = self._rooms.pop(closed.room, None)
            if sequence is None:
                continue  # the room of a request that was refused
            log.info(_words(closed), extra={"rid": sequence.rid})
            if (line := sequence.timeline) is not None:
                _note_end(line, closed)
            if sequence.state in {SequenceState.WAITING, SequenceState.RUNNING}:
                self._scheduler.remove(sequence)
                if closed.declined:
                    self._streams.end(sequence, None, None)
                else:
                    error = StreamError(kind=ErrorKind.UNAVAILABLE, message=closed.message)
                    self._streams.end(sequence, FinishReason.ERROR, error)
            self._release(sequence)
        started = [s for s in self._rooms.values() if s.row != NO_ROW]
        unclaimed = [s.allocated_len for s in started if not self._sender.claimed(s.room)]
        self._unclaimed = (sum(unclaimed), len(unclaimed))

    def close(self) -> None:
        self._sender.close()

    def on_peer(self, peer: str, data: bytes) -> None:
        self._sender.on_message(peer, data)

    def on_peer_lost(self, peer: str) -> None:
        self._sender.on_peer_lost(peer)

    def counts(self) -> dict[str, int]:
        return self._sender.counts()

    def rooms(self) -> tuple[RoomView, ...]:
        return self._sender.rooms()

    def transfers(self) -> HandoffReport | None:
        return self._sender.report()

    @property
    def waiting(self) -> list[Sequence]:
        return []

    @property
    def kv_bytes(self) -> tuple[int, int]:
        return self._sender.bytes_sent, 0

    def _advance_alone(self, progress: Progress) -> None:
        """A request that ends at its first token moves no KV."""
        if progress.token is not None:
            sequence = progress.sequence
            finish = sequence.finish_reason(self._eos, self._scheduler.limits.context_len)
            self._streams.token(sequence, progress.logprob, finish, last=True)
            self._scheduler.remove(sequence)
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._scheduler.cache.release(sequence)
        sequence.move(SequenceState.FINISHED)
        self._streams.forget(sequence)


def _note_end(line: Timeline, closed: Closed) -> None:
    """What became of its room."""
    line.note(Mark.CLOSED)
    line.room_error = "" if closed.ok else closed.message
    line.declined = closed.declined
    line.moved_bytes, line.writes = closed.moved_bytes, closed.writes
    line.sending_s = closed.sending_s


def _words(closed: Closed) -> str:
    """How a room ended, for the log."""
    if closed.ok:
        return "all KV sent"
    return closed.message if closed.declined else f"handoff failed: {closed.message}"


_GONE = (ErrorKind.UNAVAILABLE, "the request was aborted at the prefill rank")


def single_token(sequence: Sequence) -> bool:
    """Whether the first token is the last one wanted: known before anything is computed."""
    return sequence.params.max_new_tokens - sequence.output_len <= 1
