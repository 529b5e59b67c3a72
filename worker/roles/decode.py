"""DecodeRole: reserves pages, announces them to the prefill rank, generates once the KV is there.

Where little of a prompt is missing it is computed here instead, and the prefill rank told so.
Pages that were announced are released only when the receiver says so: a peer may still write them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from core.dump import RoomView
from core.handoffs import HandoffReport
from core.wire import ErrorKind, FinishReason, Incarnation, StreamError, TokenRequest
from disagg.receiver import Failed, Ready, Receiver, Released
from worker.plan import RowKind
from worker.roles.base import ROOM_IN_USE
from worker.roles.local_prefill import LocalPrefill, Place
from worker.roles.prefill import single_token
from worker.scheduler.scheduler import Progress, Scheduler, Step
from worker.scheduler.waiting import WaitingQueue
from worker.sequence import Sequence, SequenceState
from worker.streams import Streams
from worker.timeline import Mark

log = logging.getLogger(__name__)

Dial = Callable[[Incarnation], str]  # a prefill rank -> the name of the link to it


class DecodeRole:
    """Retracted sequences compute themselves again here, as mixed rows; nothing is sent twice."""

    def __init__(
        self,
        scheduler: Scheduler,
        streams: Streams,
        receiver: Receiver,
        dial: Dial,
        eos: frozenset[int],
        local: LocalPrefill,
    ) -> None:
        self._scheduler = scheduler
        self._streams = streams
        self._receiver = receiver
        self._dial = dial
        self._eos = eos
        self._local = local
        self._proven: dict[str, Incarnation] = {}  # links over which KV has come
        self._arrivals = WaitingQueue()  # want pages
        self._rooms: dict[int, Sequence] = {}  # announced, until the pages are ours alone

    def admit(self, sequence: Sequence) -> None:
        if single_token(sequence):  # the prefill rank does it all
            self._streams.end(sequence, None, None)
            self._finish(sequence)
        elif sequence.room in self._rooms:
            self._streams.end(sequence, FinishReason.ERROR, ROOM_IN_USE)
            self._finish(sequence)
        else:
            self._arrivals.push(sequence)

    def refuse(self, request: TokenRequest, kind: ErrorKind, message: str) -> None:
        """The prefill rank was not told of the room yet; the router stops its leg."""

    def advance(self, progress: Progress) -> None:
        if progress.token is None:
            return
        sequence = progress.sequence
        finish = sequence.finish_reason(self._eos, self._scheduler.limits.context_len)
        self._streams.token(sequence, progress.logprob, finish)
        if finish is not None:
            self._leave(sequence)

    def stepped(self, step: Step, took_s: float) -> None:
        if not step.batch:
            return
        decodes = step.plan.kinds.count(RowKind.DECODE)
        self._local.stepped(step.plan.tokens - decodes, decodes, took_s)

    def stop(self, sequence: Sequence, finish: FinishReason, error: StreamError | None) -> None:
        self._streams.end(sequence, finish, error)
        if sequence in self._arrivals:
            self._arrivals.remove(sequence)
            self._finish(sequence)
        elif sequence.state is SequenceState.AWAITING_KV:
            sequence.move(SequenceState.CLOSING)
            self._receiver.cancel(sequence.room, "the request was aborted")
        else:
            self._leave(sequence)

    def poll(self, now: float) -> None:
        for outcome in self._receiver.poll():
            sequence = self._rooms[outcome.room]
            match outcome:
                case Ready():
                    self._arrived(sequence, outcome)
                    self._begin(sequence, outcome.first_token)
                case Failed():
                    log.info("handoff failed: %s", outcome.message, extra={"rid": sequence.rid})
                    if sequence.state is SequenceState.AWAITING_KV:
                        error = StreamError(kind=outcome.kind, message=outcome.message)
                        self._streams.end(sequence, FinishReason.ERROR, error)
                        sequence.move(SequenceState.CLOSING)
                case Released():
                    del self._rooms[sequence.room]
                    # Nothing counts as computed before Ready, so nothing incomplete is cached.
                    self._scheduler.cache.release(sequence)
                    self._finish(sequence)
        self._reserve(now)

    def close(self) -> None:
        """The receiver has no threads."""

    def on_peer(self, peer: str, data: bytes) -> None:
        self._receiver.on_message(peer, data)

    def on_peer_lost(self, peer: str) -> None:
        self._proven.pop(peer, None)
        self._receiver.on_peer_lost(peer)

    def counts(self) -> dict[str, int]:
        return {"pending": len(self._arrivals), **self._receiver.counts()}

    def rooms(self) -> tuple[RoomView, ...]:
        return self._receiver.rooms()

    def transfers(self) -> HandoffReport | None:
        return self._receiver.report()

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._arrivals)

    @property
    def kv_bytes(self) -> tuple[int, int]:
        return 0, self._receiver.bytes_received

    def _reserve(self, now: float) -> None:
        """Take pages for what fits, in order; retracted sequences have the first claim on them."""
        scheduler = self._scheduler
        table = scheduler.cache.table
        most = scheduler.limits.max_running
        while len(self._arrivals) and not len(scheduler.waiting) and table.free:
            if len(scheduler.running) + len(self._rooms) >= most:
                return
            sequence = next(iter(self._arrivals))
            to, place = sequence.length, self._place(sequence)
            limit = sequence.reusable_len if place is Place.LOCAL else to
            if not scheduler.admission.reserve(sequence, scheduler.running, to, limit):
                return
            self._arrivals.remove(sequence)
            self._receiver.count.placed[place.value] += 1
            self._receiver.count.took("reserve", now - sequence.arrived_s)
            if place is Place.LOCAL:
                self._compute(sequence)
            else:
                self._announce(sequence)

    def _place(self, sequence: Sequence) -> Place:
        """Where the tokens that are not cached here are computed."""
        held = self._scheduler.cache.tree.peek(sequence.ids, sequence.salt)
        remainder = sequence.length - min(held, sequence.reusable_len)
        proven = sequence.request.route.prefill in self._proven.values()
        return self._local.place(remainder, proven=proven)

    def _compute(self, sequence: Sequence) -> None:
        if sequence.timeline is not None:
            sequence.timeline.note(Mark.LOCAL)
        peer = self._dial(sequence.request.route.prefill)
        self._receiver.decline(sequence.room, sequence.rid, peer)
        log.info(
            "computed here: %d of %d tokens are missing",
            sequence.remaining,
            sequence.length,
            extra={"rid": sequence.rid},
        )
        self._scheduler.resume(sequence)

    def _announce(self, sequence: Sequence) -> None:
        sequence.move(SequenceState.AWAITING_KV)
        self._rooms[sequence.room] = sequence
        held, to = sequence.computed_len, sequence.length
        slots = self._scheduler.cache.table.read(sequence.row, held, to)
        peer = self._dial(sequence.request.route.prefill)
        self._receiver.announce(sequence.room, sequence.rid, peer, held, slots)
        if sequence.timeline is not None:
            sequence.timeline.note(Mark.ANNOUNCED)
        log.info(
            "room %d announced to %s, %d of %d tokens held",
            sequence.room,
            peer,
            held,
            to,
            extra={"rid": sequence.rid},
        )

    def _arrived(self, sequence: Sequence, ready: Ready) -> None:
        """Learn from a handoff, where something crossed."""
        if (line := sequence.timeline) is not None:
            line.note(Mark.KV)
            line.moved_bytes = ready.moved_bytes
        if missing := sequence.length - sequence.computed_len:
            route = sequence.request.route
            self._proven[self._dial(route.prefill)] = route.prefill
            self._local.handed_over(missing, ready.took_s)

    def _begin(self, sequence: Sequence, first_token: int) -> None:
        log.info("all KV arrived", extra={"rid": sequence.rid})
        del self._rooms[sequence.room]
        sequence.computed_len = sequence.length
        if sequence.state is SequenceState.CLOSING:  # stopped when the last page had arrived
            self._scheduler.cache.release(sequence)
            self._finish(sequence)
            return
        self._scheduler.cache.commit(sequence)
        sequence.append(first_token)
        self._scheduler.resume(sequence)
        finish = sequence.finish_reason(self._eos, self._scheduler.limits.context_len)
        if finish is not None:  # the prefill rank has said so already
            self._streams.end(sequence, finish, None)
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._scheduler.cache.release(sequence)
        self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.move(SequenceState.FINISHED)
        self._streams.forget(sequence)
