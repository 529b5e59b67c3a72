"""The router's spans of a request: whose children they are, and that all of them end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from core.errors import AntiphonError, Overloaded
from core.wire import ErrorKind, FinishReason, Role, SamplingParams
from router.rpc.gen import antiphon_pb2 as pb
from router.text.request import ChatPrompt, TextRequest
from router.tracing import CANCELLED, LATE, LEFT, STOPPED
from tests.support.doors import http_client, make_door, services
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_streams import HANG, FakeStreams, chunk, failure, says
from tests.support.fronts import front, release_all, settle
from tests.support.rpc_calls import rpc_client
from tests.support.spans import CALLER, Traced, check_tree, named

SAMPLING = SamplingParams(max_new_tokens=0, temperature=0.5)
PAIR = (Role.PREFILL, Role.DECODE)


def asks(prompt: Any = "hi", **fields: Any) -> TextRequest:
    return TextRequest(rid="r1", prompts=(prompt,), sampling=SAMPLING, trace=CALLER, **fields)


def opened(script: Any, request: TextRequest, use: Any = None, **door: Any) -> tuple[list, list]:
    """The spans of a request, and the streams that its door opened."""
    traced, streams = Traced(), FakeStreams(script)

    async def main() -> None:
        behind = make_door(streams, tracer=traced.tracer, **door)

        async def read() -> None:
            async with behind.open(request) as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(read())
        if use is not None:
            await eventually(lambda: streams.calls)
            await settle()
            use(behind, task)
        await asyncio.gather(task, return_exceptions=True)

    run_tidy(main)
    return traced.spans(), streams.calls


# --- the front door -----------------------------------------------------------------------------


def test_a_request_is_a_span_of_its_callers_trace_with_what_it_asked_and_cost():
    spans, calls = opened(says("ok", cached=1), asks(max_new_tokens=9, seed=4, n=2))
    check_tree(spans)
    request = named(spans, "text_completion owner/tiny")
    tokens = named(spans, "tokenise")
    assert (request.trace_id, request.parent_id) == ("ab" * 16, "cd" * 8)
    assert (request.kind, request.error) == ("server", "")
    assert tokens.parent_id == request.span_id
    assert len(spans) == 2  # the attempts are the dispatcher's
    assert request.attributes["gen_ai.usage.input_tokens"] == 2
    assert request.attributes["gen_ai.usage.output_tokens"] == 6
    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 1
    assert request.attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert request.attributes["gen_ai.request.model"] == "owner/tiny"
    assert request.attributes["gen_ai.request.max_tokens"] == 9
    assert request.attributes["gen_ai.request.seed"] == 4
    assert request.attributes["gen_ai.request.temperature"] == 0.5
    assert request.attributes["gen_ai.request.choice.count"] == 2
    assert request.attributes["antiphon.rid"] == "r1"
    parents = {call.trace for call in calls}
    assert parents == {f"00-{request.trace_id}-{request.span_id}-01"}


def test_a_conversation_is_named_as_one():
    chat = ChatPrompt(messages=({"role": "user", "content": "secret words"},))
    spans, _ = opened(says("ok"), asks(chat))
    span = named(spans, "chat owner/tiny")
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert "secret words" not in str(spans)


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda door, task: task.cancel(), LEFT),
        (lambda door, task: door.abort("r1"), STOPPED),
    ],
    ids=["left", "stopped"],
)
def test_a_request_that_is_cut_short_says_by_what(use, why):
    spans, _ = opened(lambda _: [chunk(0, 65), HANG], asks(), use)
    request = named(spans, "text_completion")
    assert request.error == why
    assert request.attributes["error.type"] == "aborted"
    assert request.attributes["gen_ai.usage.output_tokens"] == 1


def test_a_request_that_is_out_of_time_says_so():
    spans, _ = opened(lambda _: [HANG], asks(timeout_s=0.01))
    assert named(spans, "text_completion").error == LATE


@pytest.mark.parametrize(
    ("request_", "script", "status", "words"),
    [
        (asks(max_new_tokens=5000), says("x"), "invalid", "maximum context length"),
        (
            asks(),
            lambda _: [failure(ErrorKind.UNAVAILABLE, "rank gone")],
            "unavailable",
            "gone",
        ),
        (asks(), lambda _: [failure(ErrorKind.INTERNAL, "a defect")], "error", "a defect"),
    ],
    ids=["invalid", "unavailable", "internal"],
)
def test_a_request_that_fails_ends_its_spans_with_the_reason(request_, script, status, words):
    spans, _ = opened(script, request_)
    request = named(spans, "text_completion")
    assert request.attributes["error.type"] == status
    assert words in request.error


def test_a_request_that_finds_no_place_says_so():
    traced = Traced()

    async def main() -> None:
        door = make_door(FakeStreams(says("x")), limit=1, tracer=traced.tracer)
        with door.admission.ticket(1), pytest.raises(Overloaded):
            async with door.open(asks()):
                pass

    run_tidy(main)
    (request,) = traced.spans()
    assert request.attributes["error.type"] == "overloaded"
    assert request.error != ""


def test_a_prompt_that_cannot_be_encoded_ends_both_spans():
    chat = ChatPrompt(messages=({"role": "user", "content": "x"},))
    spans, _ = opened(says("ok"), asks(chat), template=None)
    assert {span.error for span in spans} != {""}
    assert named(spans, "tokenise").error == named(spans, "chat").error != ""


def test_without_a_tracer_nothing_is_handed_on():
    streams = FakeStreams(says("ok"))

    async def main() -> None:
        async with make_door(streams).open(asks()) as stream:
            async for _ in stream:
                pass

    run_tidy(main)
    assert [call.trace for call in streams.calls] == [""]


def test_both_fronts_take_the_callers_traceparent():
    traced = Traced()
    body = {"prompt": "hi", "max_tokens": 4}

    async def main() -> None:
        door = make_door(FakeStreams(says("ok")), tracer=traced.tracer)
        async with http_client(services(door)) as client:
            for headers in ({"traceparent": CALLER}, {}):
                await client.post("/v1/completions", json=body, headers=headers)
        async with rpc_client(tracer=traced.tracer) as client:
            asked = pb.GenerateRequest(text="hi")
            call = client.stub.Generate(asked, metadata=(("traceparent", CALLER),))
            assert [message async for message in call]

    run_tidy(main)
    http, alone, rpc = (s for s in traced.spans() if s.kind == "server")
    assert http.trace_id == rpc.trace_id == "ab" * 16
    assert http.parent_id == rpc.parent_id == "cd" * 8
    assert alone.parent_id == ""


# --- the dispatcher -----------------------------------------------------------------------------


def test_an_attempt_names_its_ranks_and_is_the_parent_of_what_they_do():
    traced = Traced()

    async def main() -> None:
        async with front(*PAIR, tracer=traced.tracer) as it:
            task = asyncio.create_task(it.collect(3, trace=CALLER))
            await settle()
            sent = {leg.request.trace for c in it.fleet.live for leg in c.legs}
            await release_all(it.fleet)
            await task
            requests.extend(sent)

    requests: list[str] = []
    run_tidy(main)
    spans = traced.spans()
    attempt, dispatch = named(spans, "attempt"), named(spans, "dispatch")
    assert requests == [f"00-{attempt.trace_id}-{attempt.span_id}-01"]
    assert (attempt.trace_id, attempt.parent_id) == ("ab" * 16, "cd" * 8)
    assert dispatch.parent_id == attempt.span_id
    assert attempt.attributes["antiphon.rid"] == "r.0"
    assert attempt.attributes["antiphon.prefill.rank"] == "prefill/0/0"
    assert dispatch.attributes["antiphon.decode.rank"] == "decode/0/0"
    assert attempt.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attempt.attributes["gen_ai.usage.output_tokens"] == 3
    assert [event.name for event in attempt.events] == ["first_token"]
    assert (attempt.error, dispatch.error) == ("", "")


def test_a_lost_rank_ends_its_attempt_with_the_reason_and_another_one_begins():
    traced = Traced()

    async def main() -> None:
        async with front(Role.PREFILL, Role.DECODE, Role.DECODE, tracer=traced.tracer) as it:
            task = asyncio.create_task(it.collect(6, trace=CALLER))
            await settle()
            busy = next(c for c in it.fleet.live if c.info.role is Role.DECODE and c.legs)
            it.fleet.client(Role.PREFILL).legs[0].release()
            await settle()
            busy.lose()
            await settle()
            it.remember()
            await release_all(it.fleet)
            await task

    run_tidy(main)
    first, second = (s for s in traced.spans() if s.name == "attempt")
    assert (first.attributes["antiphon.rid"], second.attributes["antiphon.rid"]) == ("r.0", "r.1")
    assert first.trace_id == second.trace_id
    assert first.parent_id == second.parent_id == "cd" * 8
    assert "is lost" in first.error
    reroute = next(event for event in first.events if event.name == "reroute")
    assert reroute.attributes == {"reason": first.error, "output_tokens": 1}
    assert second.error == ""
    assert second.attributes["antiphon.reused.output_tokens"] == 1


def test_without_a_route_the_attempt_says_so():
    traced = Traced()

    async def main() -> None:
        async with front(Role.PREFILL, wait_s=0.01, tracer=traced.tracer) as it:
            with pytest.raises(AntiphonError, match="no complete route"):
                await it.collect(3, trace=CALLER)

    run_tidy(main)
    spans = traced.spans()
    assert {span.name for span in spans} == {"attempt", "dispatch"}
    assert all("no complete route" in span.error for span in spans)


@pytest.mark.parametrize("leave", ["enough", "cancel"])
def test_a_stream_that_is_left_failed_only_where_its_caller_went(leave):
    traced = Traced()

    async def main() -> None:
        async with front(*PAIR, tracer=traced.tracer) as it:
            clients = list(it.fleet.live)
            params = SamplingParams(max_new_tokens=3)
            stream = it.dispatcher.stream("r", [3, 1, 4, 1, 5], params, trace=CALLER)
            async with aclosing(stream):
                first = asyncio.ensure_future(anext(stream))
                await settle()
                if leave == "cancel":
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)
                else:
                    it.fleet.client(Role.PREFILL).legs[0].release()
                    await first
            assert [c.aborted for c in clients] == [["r.0"], ["r.0"]]
            enough = ["r.0"] if leave == "enough" else []
            assert [c.done for c in clients] == [enough, enough]

    run_tidy(main)
    attempt = named(traced.spans(), "attempt")
    assert attempt.error == (CANCELLED if leave == "cancel" else "")


def test_a_leg_that_fails_is_no_reason_to_tell_the_other_that_all_is_well():
    """The front door leaves a stream at its last chunk, whatever that says."""
    traced = Traced()

    async def main() -> None:
        async with front(*PAIR, tracer=traced.tracer) as it:
            params = SamplingParams(max_new_tokens=3)
            stream = it.dispatcher.stream("r", [3, 1, 4, 1, 5], params, trace=CALLER)
            async with aclosing(stream):
                last = asyncio.ensure_future(anext(stream))
                await settle()
                leg = it.fleet.client(Role.DECODE).legs[0]
                leg.plan[:] = [leg.error(ErrorKind.INVALID)]
                leg.release()
                assert (await last).finish is FinishReason.ERROR
            other = it.fleet.client(Role.PREFILL)
            assert (other.aborted, other.done) == (["r.0"], [])

    run_tidy(main)
    assert named(traced.spans(), "attempt").error != ""
