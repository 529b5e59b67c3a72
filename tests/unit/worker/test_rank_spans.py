"""What a rank's requests leave as spans; the step thread only notes when things happened."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from core.clock import VirtualClock
from core.rpc.events import Aborted, PeerLost, RouterLost, Submitted
from core.tracing.span import SpanRecord
from core.wire import Role, TokenRequest
from tests.support.calm_pair import CalmPair
from tests.support.engines import Listener, make_unified
from tests.support.requests import request
from tests.support.spans import CALLER, Traced, named
from worker import spans as spans_module
from worker.engine import Engine
from worker.spans import RankSpans
from worker.timeline import Mark, Timeline

PROMPT = [1, 2, 3, 4, 5]


class Ticking(VirtualClock):
    """A second passes whenever somebody looks."""

    def epoch(self) -> float:
        self.advance(1.0)
        return super().epoch()


def watch(engine: Engine, role: Role, clock: VirtualClock | None = None) -> Traced:
    clock = clock or Ticking()
    traced = Traced(f"{role.value}/0/0", clock)
    engine.streams.spans = RankSpans(traced.tracer, clock, role)
    return traced


def traced_(wanted: TokenRequest) -> TokenRequest:
    return msgspec.structs.replace(wanted, trace=CALLER)


def events(span: SpanRecord) -> list[str]:
    return [event.name for event in span.events]


def check(spans: list[SpanRecord]) -> None:
    """Children of the router's span, in order, each with its events inside."""
    for span in spans:
        assert (span.trace_id, span.parent_id) == ("ab" * 16, "cd" * 8)
        assert span.start_s <= span.end_s
        assert all(span.start_s <= event.at_s <= span.end_s for event in span.events), span


# --- a unified rank -----------------------------------------------------------------------------


def unified(
    *asked: TokenRequest, then: Callable[[Listener], None] = lambda listener: None, **limits: int
) -> list[SpanRecord]:
    engine = make_unified(**limits)
    traced, listener = watch(engine, Role.UNIFIED), Listener(engine)
    for wanted in asked:
        listener.submit(wanted)
    listener.step(2)
    then(listener)
    listener.step(80)
    spans = traced.spans()
    check(spans)
    return spans


def test_a_prompt_in_chunks_and_its_answer():
    prefill, decode = unified(traced_(request("r", list(range(1, 12)), 5)), step_tokens=4)
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.end_s == decode.start_s
    assert events(prefill) == ["started", "first_chunk", "first_token"]
    assert prefill.events[1].at_s < prefill.events[2].at_s
    assert prefill.attributes["gen_ai.usage.input_tokens"] == 11
    assert decode.attributes["gen_ai.usage.output_tokens"] == 5
    assert decode.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert decode.attributes["antiphon.rid"] == "r"
    assert decode.component == decode.attributes["antiphon.rank"] == "unified/0/0"
    assert (prefill.error, decode.error) == ("", "")


def test_a_single_token_takes_no_decode():
    (span,) = unified(traced_(request("r", PROMPT, 1)))
    assert (span.name, span.error) == ("prefill", "")


def test_a_request_that_is_not_traced_leaves_nothing():
    assert unified(request("r", PROMPT, 5)) == []


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Aborted("a", "r"), "stopped by the router"),
        (RouterLost("a"), "the session of the router ended"),
        (Aborted("a", "r", done=True), ""),
    ],
    ids=["aborted", "router lost", "enough"],
)
def test_a_request_that_is_stopped_says_why(event, why):
    wanted = traced_(request("r", PROMPT, 50))
    spans = unified(wanted, then=lambda listener: listener.engine.handle(event))
    assert named(spans, "prefill").error == ""
    decode = named(spans, "decode")
    assert decode.error == why
    assert decode.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_a_request_that_is_stopped_before_it_started_was_in_its_prefill():
    engine = make_unified()
    traced, listener = watch(engine, Role.UNIFIED), Listener(engine)
    listener.submit(traced_(request("r", PROMPT, 5)))
    engine.handle(Aborted("a", "r"))
    listener.step()
    (span,) = traced.spans()
    assert (span.name, span.error, events(span)) == ("prefill", "stopped by the router", [])


def test_records_of_the_log_carry_the_trace_id_as_long_as_the_request_lives(caplog):
    caplog.set_level(logging.INFO)
    engine = make_unified()
    traced, listener = watch(engine, Role.UNIFIED), Listener(engine)
    listener.submit(traced_(request("r", PROMPT, 5)))
    listener.step(20)
    logging.getLogger("worker.test").info("late", extra={"rid": "r"})
    said = {r.getMessage().split(":")[0]: getattr(r, "trace_id", "") for r in caplog.records}
    assert said["ended"] == said["submitted"] == "ab" * 16
    assert said["late"] == ""
    traced.spans()


def test_retractions_are_counted():
    asked = [traced_(request(rid, PROMPT, 30)) for rid in ("r", "s")]
    spans = unified(*asked, pages=45)
    counts = [s.attributes["antiphon.retractions"] for s in spans if s.name == "decode"]
    assert len(counts) == 2
    assert sum(counts) > 0


def test_what_is_open_when_the_rank_ends_is_cut_short():
    engine = make_unified()
    traced, listener = watch(engine, Role.UNIFIED), Listener(engine)
    listener.submit(traced_(request("r", PROMPT, 50)))
    listener.step(3)
    assert engine.streams.spans is not None
    engine.streams.spans.cut(engine.streams.sequences(), "the rank was stopped")
    spans = traced.spans()
    assert named(spans, "decode").error == "the rank was stopped"
    assert named(spans, "prefill").error == ""


def test_the_step_thread_notes_moments_and_another_one_makes_spans(monkeypatch):
    threads: dict[str, set[str]] = {"note": set(), "span": set()}
    note, span = Timeline.note, spans_module._span

    def noting(line: Timeline, mark: Mark) -> None:
        threads["note"].add(threading.current_thread().name)
        note(line, mark)

    def making(*args: Any) -> SpanRecord:
        threads["span"].add(threading.current_thread().name)
        return span(*args)

    monkeypatch.setattr(Timeline, "note", noting)
    monkeypatch.setattr(spans_module, "_span", making)
    assert unified(traced_(request("r", PROMPT, 5)))
    assert threads == {"note": {threading.main_thread().name}, "span": {"tracing"}}


# --- a pair -------------------------------------------------------------------------------------


class TracedPair:
    """A calm pair whose ranks trace."""

    def __init__(self, local: str | int = "off") -> None:
        self.pair = CalmPair(local=local)
        self.clock = Ticking()
        self._prefill = watch(self.pair.prefill, Role.PREFILL, self.clock)
        self._decode = watch(self.pair.decode, Role.DECODE, self.clock)

    def ask(self, rid: str, count: int = 4, room: int = 7, length: int = 5) -> TokenRequest:
        prompt = list(range(1, length + 1))
        return traced_(self.pair.ask(rid, prompt, count, room=room))

    def spans(self) -> tuple[list[SpanRecord], list[SpanRecord]]:
        sides = self._prefill.spans(), self._decode.spans()
        for spans in sides:
            check(spans)
        return sides


def test_a_handoff_is_a_transfer_on_both_sides():
    it = TracedPair()
    it.pair.send(it.ask("r"))
    it.pair.settle()
    sent, received = it.spans()
    assert [span.name for span in sent] == ["prefill", "transfer.send"]
    assert [span.name for span in received] == ["transfer.receive", "decode"]
    assert {span.error for span in sent + received} == {""}
    moved = [
        named(side, "transfer").attributes["antiphon.transfer.bytes"] for side in (sent, received)
    ]
    assert moved[0] == moved[1] > 0
    assert sent[1].attributes["antiphon.transfer.writes"] >= 1
    assert received[0].attributes["antiphon.transfer.wait_s"] > 0
    assert events(received[0]) == ["announced"]
    assert received[0].end_s == received[1].start_s
    assert received[1].attributes["gen_ai.usage.output_tokens"] == 3  # the first is the other's
    assert sent[0].attributes["antiphon.declined"] is False


def test_a_prompt_that_the_decode_rank_computes_is_a_prefill_there():
    it = TracedPair(local=3)
    it.pair.send(it.ask("first"))
    it.pair.settle()
    it.pair.send(it.ask("r", room=8))
    it.pair.settle()
    sent, received = (
        [s for s in side if s.attributes["antiphon.rid"] == "r"] for side in it.spans()
    )
    assert [span.name for span in received] == ["prefill", "decode"]
    assert [span.name for span in sent if not span.attributes["antiphon.declined"]] == []
    assert all(span.error == "" for span in sent)


def test_a_single_token_is_the_prefill_ranks_alone():
    it = TracedPair()
    it.pair.send(it.ask("r", count=1))
    it.pair.settle()
    sent, received = it.spans()
    assert [span.name for span in sent] == ["prefill"]
    assert received == []


def test_an_abort_while_kv_is_awaited():
    it = TracedPair()
    it.pair.send(it.ask("r"), it.pair.decode)
    it.pair.step(it.pair.decode)
    it.pair.decode.handle(Aborted("a", "r"))
    it.pair.settle()
    _, received = it.spans()
    (span,) = received
    assert (span.name, span.error) == ("transfer.receive", "stopped by the router")


def test_an_abort_that_comes_with_the_last_kv():
    """It was stopped before it could decode, whatever arrived afterwards."""
    it = TracedPair()
    it.pair.send(it.ask("r"))
    it.pair.step(it.pair.decode)
    while it.pair.to_decode or it.pair.to_prefill or it.pair.jobs or not it.pair.of("prefill", "r"):
        it.pair.step(it.pair.prefill)
        while it.pair.jobs:
            it.pair._run_job()
        while it.pair.to_prefill or it.pair.to_decode:
            it.pair._hear()
    it.pair.decode.handle(Aborted("a", "r"))
    it.pair.settle()
    _, received = it.spans()
    (span,) = received
    assert (span.name, span.error) == ("transfer.receive", "stopped by the router")


def test_a_lost_peer_is_the_reason_on_both_sides():
    it = TracedPair()
    wanted = it.ask("r")
    it.pair.send(wanted)
    it.pair.step(it.pair.decode)
    while it.pair.to_prefill:
        it.pair._hear()
    it.pair.step(it.pair.prefill)
    it.pair.prefill.handle(PeerLost("link0"))
    it.pair.decode.handle(PeerLost("link0"))
    it.pair.settle()
    sent, received = it.spans()
    assert "link to the decode rank ended" in named(sent, "transfer.send").error
    assert named(sent, "prefill").error == ""
    assert "link to the prefill rank ended" in named(received, "transfer.receive").error


def test_a_prefill_rank_that_ends_while_it_sends_says_so():
    it = TracedPair()
    it.pair.send(it.ask("r"))
    while not it.pair.of("prefill", "r"):
        it.pair.step(it.pair.prefill)
    spans, streams = it.pair.prefill.streams.spans, it.pair.prefill.streams
    assert spans is not None
    spans.cut(list(streams.sequences()), "the rank was stopped")
    sent, _ = it.spans()
    assert [span.name for span in sent] == ["prefill", "transfer.send"]
    assert [span.error for span in sent] == ["", "the rank was stopped"]


def test_requests_of_the_same_engine_are_told_apart():
    it = TracedPair()
    other = "00-" + "12" * 16 + "-" + "34" * 8 + "-01"
    it.pair.send(it.ask("r"))
    second = msgspec.structs.replace(it.ask("s", room=9), trace=other)
    for engine in (it.pair.prefill, it.pair.decode):
        engine.handle(Submitted("a", second))
    it.pair.settle()
    sides = it._prefill.spans(), it._decode.spans()
    for side in sides:
        traces = {s.attributes["antiphon.rid"]: s.trace_id for s in side}
        assert traces == {"r": "ab" * 16, "s": "12" * 16}
