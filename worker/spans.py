"""Spans of a rank: each request's Timeline, turned into spans by the tracer's thread.

    prefill            arrival to the first token       prefill and unified ranks; a decode rank,
                                                        where it computes the prompt itself
    transfer.send      first write to the room's end    prefill ranks
    transfer.receive   arrival to the last KV           decode ranks
    decode             from there to the last token     decode and unified ranks

All are children of the router's attempt, one after the other. A request that fails has the reason
on the one it was in.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from core.clock import Clock
from core.tracing.span import SpanContext, SpanEvent, SpanRecord, Value, parse_traceparent
from core.tracing.tracer import Tracer
from core.wire import Role
from worker.plan import RowKind
from worker.scheduler.scheduler import Progress, Step
from worker.sequence import Sequence
from worker.timeline import Mark, Timeline

_EVENTS: Final = {
    "prefill": (Mark.STARTED, Mark.CHUNK, Mark.TOKEN),
    "transfer.receive": (Mark.ANNOUNCED,),
    "decode": (Mark.TOKEN,),
}


class RankSpans:
    """What an engine tells of its traced requests. Its thread only."""

    def __init__(self, tracer: Tracer, clock: Clock, role: Role) -> None:
        self._tracer = tracer
        self._clock = clock
        self._role = role

    def begin(self, sequence: Sequence) -> None:
        """A request came; it gets a timeline where it is traced."""
        request = sequence.request
        context = parse_traceparent(request.trace)
        if context is not None:
            line = Timeline(request.rid, request.trace, self._clock.epoch)
            line.prompt_tokens = sequence.length
            line.note(Mark.ARRIVED)
            sequence.timeline = line
            self._tracer.claim(request.rid, context.trace_id)

    def launched(self, step: Step) -> None:
        """A step begins."""
        for part in step.batch:
            if part.kind is RowKind.EXTEND and (line := part.sequence.timeline) is not None:
                line.note(Mark.STARTED)

    def computed(self, progress: Progress) -> None:
        """A step is over for one sequence."""
        line = progress.sequence.timeline
        if line is not None and progress.kind is RowKind.EXTEND:
            line.note(Mark.CHUNK)

    def over(self, sequence: Sequence) -> None:
        """The request is over and its pages are given back: export its spans."""
        if (line := sequence.timeline) is not None:
            sequence.timeline = None
            line.retractions = sequence.retractions
            line.cached_tokens = sequence.cached_len
            self._tracer.disclaim(line.rid)
            self._tracer.put(partial(_spans, line, self._role, self._tracer.component))

    def cut(self, sequences: Iterable[Sequence], reason: str) -> None:
        """The rank ends: so do these."""
        for sequence in sequences:
            if (line := sequence.timeline) is not None:
                if Mark.ENDED not in line.at:
                    line.error = line.error or reason
                    line.note(Mark.ENDED)
                if Mark.CLOSED not in line.at:
                    line.room_error = reason
                    line.note(Mark.CLOSED)
                self.over(sequence)


def _spans(line: Timeline, role: Role, component: str) -> list[SpanRecord]:
    context = parse_traceparent(line.parent)
    assert context is not None, line.parent
    phases = _of_decode_rank(line) if role is Role.DECODE else _of_prompt(line)
    if role is Role.PREFILL:
        phases = [*phases, *_of_sender(line)]
    return [_span(line, context, component, phase) for phase in phases]


Phase = tuple[str, float, float, str]  # name, start, end, why it failed


def _of_decode_rank(line: Timeline) -> list[Phase]:
    at = line.at
    if Mark.LOCAL in at:
        return _of_prompt(line)
    ended = at[Mark.ENDED]
    arrived = at.get(Mark.KV)
    if arrived is not None and arrived <= ended:  # else it was stopped before
        waited = ("transfer.receive", at[Mark.ARRIVED], arrived, "")
        return [waited, ("decode", arrived, ended, line.error)]
    if line.finish is None and not line.error:
        return []  # the prefill rank did it all
    return [("transfer.receive", at[Mark.ARRIVED], ended, line.error)]


def _of_prompt(line: Timeline) -> list[Phase]:
    """Of a rank that computes the prompt: that, and what it generated afterwards."""
    at = line.at
    token, ended = at.get(Mark.TOKEN), at[Mark.ENDED]
    if token is None:
        return [("prefill", at[Mark.ARRIVED], ended, line.error)]
    computed = ("prefill", at[Mark.ARRIVED], token, "")
    if line.output_tokens > 1 or line.error:
        return [computed, ("decode", token, ended, line.error)]
    return [computed]


def _of_sender(line: Timeline) -> list[Phase]:
    """Of the room, where anything of it was computed and wanted."""
    at = line.at
    closed = at.get(Mark.CLOSED)
    if closed is None or line.declined or Mark.CHUNK not in at:
        return []
    begun = closed - line.sending_s if line.sending_s else at.get(Mark.TOKEN, at[Mark.CHUNK])
    return [("transfer.send", min(begun, closed), closed, line.room_error)]


def _span(line: Timeline, context: SpanContext, component: str, phase: Phase) -> SpanRecord:
    name, start_s, end_s, error = phase
    marks = [mark for mark in _EVENTS.get(name, ()) if mark in line.at]
    return SpanRecord(
        name=name,
        trace_id=context.trace_id,
        span_id=context.child().span_id,
        parent_id=context.span_id,
        component=component,
        start_s=start_s,
        end_s=max(start_s, end_s),
        error=error,
        attributes=_attributes(line, component, name),
        events=tuple(SpanEvent(name=m.value, at_s=line.at[m]) for m in marks),
    )


def _attributes(line: Timeline, component: str, name: str) -> dict[str, Value]:
    found: dict[str, Value] = {"antiphon.rid": line.rid, "antiphon.rank": component}
    match name:
        case "prefill":
            found["gen_ai.usage.input_tokens"] = line.prompt_tokens
            found["antiphon.cached_tokens"] = line.cached_tokens
            found["antiphon.declined"] = line.declined
        case "decode":
            found["gen_ai.usage.output_tokens"] = line.output_tokens
            found["antiphon.retractions"] = line.retractions
            if line.finish is not None:
                found["gen_ai.response.finish_reasons"] = (line.finish.value,)
        case "transfer.send":
            found["antiphon.transfer.bytes"] = line.moved_bytes
            found["antiphon.transfer.writes"] = line.writes
        case "transfer.receive":
            found["antiphon.transfer.bytes"] = line.moved_bytes
            if (announced := line.at.get(Mark.ANNOUNCED)) is not None:
                end = line.at.get(Mark.KV, line.at[Mark.ENDED])
                found["antiphon.transfer.wait_s"] = max(0.0, end - announced)
    return found
