"""What the operator lets one request have, checked before any work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from core.errors import RequestError
from core.wire import FinishReason, SamplingParams
from router.text.request import ChatPrompt, TextEvent, TextRequest
from tests.support.doors import make_door
from tests.support.eventually import run_tidy
from tests.support.fake_streams import FakeStreams, chunk, says


def asks(*prompts: Any, **fields: Any) -> TextRequest:
    sampling = SamplingParams(max_new_tokens=0)
    return TextRequest(rid="r", prompts=prompts or ("hello",), sampling=sampling, **fields)


def answer(script: Callable, request: TextRequest, **door: Any) -> tuple[list[TextEvent], list]:
    """The events, and the token streams behind them."""
    streams = FakeStreams(script)
    events: list[TextEvent] = []

    async def main() -> None:
        async with make_door(streams, **door).open(request) as stream:
            async for step in stream:
                events.extend(step)

    run_tidy(main)
    return events, streams.calls


def refusal(request: TextRequest, **door) -> RequestError:
    streams = FakeStreams(says("ok"))
    caught: list[RequestError] = []

    async def main() -> None:
        opened = make_door(streams, **door)
        opened.tokenizer.encode = lambda *_, **__: pytest.fail("it was encoded")
        with pytest.raises(RequestError) as error:
            async with opened.open(request):
                pass
        caught.append(error.value)

    run_tidy(main)
    assert not streams.calls
    return caught[0]


def test_choices_are_counted_over_all_prompts():
    for request, param in (
        (asks("a", "b", n=3), "n"),
        (asks("a", n=6), "n"),
        (asks(*"abcdef"), "prompt"),
    ):
        error = refusal(request, max_choices=5)
        assert error.param == param
        assert "6 choices" in str(error)
        assert "router.max_choices" in str(error)
    assert len(answer(says("ok"), asks("a", n=5), max_choices=5)[1]) == 5


def test_asking_for_more_output_than_allowed_is_refused_and_asking_for_none_gets_the_limit():
    error = refusal(asks(max_new_tokens=21), max_output_tokens=20)
    assert (error.param, "router.max_output_tokens" in str(error)) == ("max_tokens", True)
    for asked, context, budget in ((20, 1000, 20), (None, 1000, 20), (None, 15, 10)):
        request = asks("hello", max_new_tokens=asked)
        _, calls = answer(says("ok"), request, max_output_tokens=20, context_len=context)
        assert calls[0].params.max_new_tokens == budget


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("x" * 101, "prompt"),
        (ChatPrompt(messages=({"role": "user", "content": "x" * 100},)), "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_by_its_length(prompt, param):
    error = refusal(asks(prompt), context_len=100)
    assert (error.param, error.code) == (param, "context_length_exceeded")
    assert "at least" in str(error)


def test_the_operators_time_limit_holds_for_everybody_and_the_callers_where_it_is_shorter():
    def script(call):
        yield chunk(0, 65)
        while True:
            yield chunk(0)

    for timeout_s, limit_s in ((None, 0.02), (60.0, 0.02), (0.02, 60.0), (0.02, 0.0)):
        request = asks(timeout_s=timeout_s)
        events, _ = answer(script, request, request_timeout_s=limit_s)
        assert events[-1].finish is FinishReason.ABORT


def test_a_deadline_that_is_over_is_not_taken_for_none():
    def script(call):
        while True:
            yield chunk(0)

    events, _ = answer(script, asks(timeout_s=0.0), request_timeout_s=60.0)
    assert [event.finish for event in events] == [FinishReason.ABORT]


def test_the_queue_still_counts():
    with pytest.raises(RequestError, match="queue_limit"):
        answer(says("ok"), asks("a", n=5), max_choices=8, limit=4)
