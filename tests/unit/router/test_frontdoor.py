from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from core.errors import EngineError, Overloaded, RequestError, Unavailable
from core.metrics import PrometheusSink
from core.wire import ErrorKind, FinishReason, SamplingParams, TokenChunk
from router.frontdoor import FrontDoor
from router.text.request import ChatPrompt, TextEvent, TextRequest, TextUsage
from router.textstream import LEAD_PROMPT_TOKENS
from tests.support.doors import make_door
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_streams import HANG, Call, FakeStreams, chunk, failure, says

SAMPLING = SamplingParams(max_new_tokens=0)


def asks(*prompts: Any, **fields: Any) -> TextRequest:
    return TextRequest(rid="r", prompts=prompts or ("hello",), sampling=SAMPLING, **fields)


async def collect(door: FrontDoor, request: TextRequest) -> tuple[list[TextEvent], TextUsage]:
    async with door.open(request) as stream:
        return [event async for step in stream for event in step], stream.usage


def answer(
    script: Callable, request: TextRequest, **door: Any
) -> tuple[list, TextUsage, FakeStreams]:
    streams = FakeStreams(script)
    got: list[Any] = []

    async def main() -> None:
        got.extend(await collect(make_door(streams, **door), request))

    run_tidy(main)
    return got[0], got[1], streams


def text_of(events: list[TextEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if event.index == index)


def sample(sink: PrometheusSink, line: str) -> float:
    values = [
        v
        for k, _, v in (s.rpartition(" ") for s in sink.render().decode().splitlines())
        if k == line
    ]
    return float(values[0])


def test_text_comes_back_and_the_eos_token_is_counted_but_not_shown():
    events, usage, streams = answer(says("hé!", cached=3), asks("hello"))
    assert [event.text for event in events] == ["h", "é", "!", ""]
    assert (events[-1].finish, events[-1].matched_stop) == (FinishReason.STOP, 257)
    assert usage == TextUsage(prompt_tokens=5, completion_tokens=5, cached_tokens=3)
    assert [t for event in events for t in event.token_ids] == [*"hé!".encode(), 257]
    call = streams.calls[0]
    assert (call.rid, call.token_ids) == ("r", list(b"hello"))
    assert call.params.max_new_tokens == 995  # the rest of the context
    assert call.params.seed == 1000


def test_an_own_stop_token_is_not_shown():
    request = msgspec.structs.replace(
        asks(), sampling=SamplingParams(max_new_tokens=0, stop_token_ids=(ord("c"),))
    )
    events, usage, _ = answer(says("ab", eos=ord("c"), size=9), request)
    assert (text_of(events), events[-1].matched_stop) == ("ab", ord("c"))
    assert usage.completion_tokens == 3


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize(("include", "shown"), [(False, "one"), (True, "one STOP")])
def test_a_stop_string_ends_the_stream_and_closes_it(size, include, shown):
    request = asks(stops=(" STOP",), include_stop=include)
    events, usage, streams = answer(says("one STOP two", size=size), request)
    assert text_of(events) == shown
    assert (events[-1].finish, events[-1].matched_stop) == (FinishReason.STOP, " STOP")
    assert usage.completion_tokens == len("one STOP")
    assert streams.calls[0].closed_early == (size != 99)


def test_held_back_text_is_shown_when_the_stream_ends_otherwise():
    events, _, _ = answer(says("one ST", eos=None), asks(stops=(" STOP",)))
    assert text_of(events) == "one ST"
    assert (events[-1].finish, events[-1].matched_stop) == (FinishReason.LENGTH, None)


def test_choices_run_side_by_side_with_seeds_of_their_own():
    events, usage, streams = answer(says("ab", cached=2), asks("x", "yz", n=2, seed=(1 << 63) - 1))
    assert [text_of(events, i) for i in range(4)] == ["ab"] * 4
    assert [call.rid for call in streams.calls] == ["r-0", "r-1", "r-2", "r-3"]
    assert [call.token_ids for call in streams.calls] == [[120], [120], [121, 122], [121, 122]]
    assert [call.params.seed for call in streams.calls] == [(1 << 63) - 1, 0] * 2
    # 3 prompt tokens, each prompt once; cached: what the first choice of each prompt found
    assert usage == TextUsage(prompt_tokens=3, completion_tokens=12, cached_tokens=4)


@pytest.mark.parametrize(
    ("prompt_tokens", "begin"),
    [
        (LEAD_PROMPT_TOKENS - 1, ["open r-0", "open r-1", "open r-2"]),
        (LEAD_PROMPT_TOKENS, ["open r-0", "r-0 has a token", "open r-1"]),
    ],
)
def test_the_first_choice_of_a_long_prompt_leads(prompt_tokens, begin):
    log: list[str] = []

    def script(call: Call) -> Iterator[TokenChunk]:
        log.append(f"open {call.rid}")
        yield chunk(0, 65)
        log.append(f"{call.rid} has a token")
        yield chunk(1, 257, finish=FinishReason.STOP)

    events, _, _ = answer(script, asks("x" * prompt_tokens, n=3))
    assert log[:3] == begin
    assert {event.index for event in events if event.finish} == {0, 1, 2}


def test_the_others_start_when_the_first_choice_fails_to():
    def script(call: Call) -> list:
        return [failure(ErrorKind.UNAVAILABLE, "lost")] if call.rid == "r-0" else [HANG]

    with pytest.raises(Unavailable):
        answer(script, asks("x" * 200, n=3))


def test_leaving_early_closes_every_stream():
    sink = PrometheusSink()
    streams = FakeStreams(lambda call: [chunk(0, 65), HANG])

    async def main() -> None:
        async with make_door(streams, sink=sink).open(asks(n=3)) as stream:
            assert await anext(aiter(stream))
        assert [call.closed_early for call in streams.calls] == [True] * 3

    run_tidy(main)
    assert sample(sink, 'antiphon_requests_total{status="aborted"}') == 1
    assert sample(sink, "antiphon_aborted_requests_total") == 1
    assert sample(sink, "antiphon_requests_running") == 0


def test_a_timeout_ends_each_choice_with_a_reason():
    def script(call: Call) -> list:
        return (
            [chunk(0, 0xC3), HANG]
            if call.rid == "r-0"
            else [chunk(0, 66, finish=FinishReason.LENGTH)]
        )

    events, _, streams = answer(script, asks(n=2, timeout_s=0.05))
    ends = {event.index: event.finish for event in events if event.finish}
    assert ends == {0: FinishReason.ABORT, 1: FinishReason.LENGTH}
    assert text_of(events) == "\ufffd"  # the character that was cut off
    assert all(call.closed for call in streams.calls)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (ErrorKind.INVALID, RequestError),
        (ErrorKind.OVERLOADED, Overloaded),
        (ErrorKind.UNAVAILABLE, Unavailable),
        (ErrorKind.INTERNAL, EngineError),
    ],
)
def test_a_failed_stream_raises_after_its_text(kind, error):
    streams = FakeStreams(lambda call: [chunk(0, 65), failure(kind, "the words")])
    seen: list[str] = []

    async def read() -> None:
        async with make_door(streams).open(asks()) as stream:
            async for step in stream:
                seen.extend(event.text for event in step)

    with pytest.raises(error) as raised:
        run_tidy(read)
    assert raised.value.detail == "the words"
    assert seen == ["A"]


def test_one_failed_choice_ends_the_others():
    streams = FakeStreams(
        lambda c: [Unavailable("gone")] if c.rid == "r-1" else [chunk(0, 65), HANG]
    )

    async def main() -> None:
        with pytest.raises(Unavailable):
            await collect(make_door(streams), asks(n=2))
        assert all(call.closed for call in streams.calls)

    run_tidy(main)


def test_a_stream_that_ends_in_silence_is_an_error():
    with pytest.raises(EngineError) as raised:
        answer(lambda call: [chunk(0, 65)], asks())
    assert "without a reason" in raised.value.detail


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (asks(""), "prompt", "empty"),
        (asks(()), "prompt", "empty"),
        (asks(ChatPrompt(messages=())), "messages", "empty"),
        (asks((1, 258)), "prompt", r"\[0, 258\)"),
        (asks((-1,)), "prompt", r"\[0, 258\)"),
        (asks("x" * 10, max_new_tokens=11), "prompt", "20 tokens.*11 tokens.*10 tokens"),
        (asks("x" * 20), "prompt", "20 tokens.*at least one.*20 tokens"),
        (asks(max_new_tokens=0), "max_tokens", "at least 1"),
        (asks(stops=("",)), "stop", "empty"),
        (asks(n=0), "n", "between 1 and 128"),
        (asks(n=65), "n", "65 choices.*64"),
    ],
)
def test_what_can_never_work_is_refused_with_both_numbers(request_, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        answer(says("x"), request_, context_len=20)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": 2},
        {"stop_token_ids": (-1,)},
    ],
)
def test_wrong_sampling_is_refused(wrong):
    sampling = SamplingParams(max_new_tokens=0, **wrong)
    with pytest.raises(RequestError):
        answer(says("x"), msgspec.structs.replace(asks(), sampling=sampling))


def test_a_request_that_fills_the_context_fits():
    _, _, streams = answer(says("x"), asks("x" * 10, max_new_tokens=10), context_len=20)
    assert streams.calls[0].params.max_new_tokens == 10


def test_chat_goes_through_the_template():
    prompt = ChatPrompt(messages=({"role": "user", "content": "hi"},))
    _, _, streams = answer(says("x"), asks(prompt))
    assert bytes(streams.calls[0].token_ids) == b"<user>hi\n<assistant>"
    with pytest.raises(RequestError, match="no chat template"):
        answer(says("x"), asks(prompt), template=None)


def test_a_long_prompt_is_encoded_too():
    _, usage, _ = answer(says("x"), asks("x" * 50_000), context_len=60_000)
    assert usage.prompt_tokens == 50_000


def test_one_request_too_many_is_told_when_to_come_back():
    sink = PrometheusSink()
    streams = FakeStreams(lambda call: [chunk(0, 65), HANG])

    async def main() -> None:
        door = make_door(streams, limit=2, sink=sink)
        first = asyncio.create_task(collect(door, asks(n=2)))
        await eventually(lambda: len(streams.calls) == 2)
        with pytest.raises(Overloaded) as caught:
            await collect(door, msgspec.structs.replace(asks(), rid="other"))
        assert caught.value.retry_after_s >= 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        streams.script = says("free again")
        events, _ = await collect(door, asks())
        assert text_of(events) == "free again"

    run_tidy(main)
    assert sample(sink, 'antiphon_requests_total{status="overloaded"}') == 1
    assert sample(sink, 'antiphon_requests_total{status="ok"}') == 1


def test_the_numbers_of_a_request():
    sink = PrometheusSink()
    answer(says("abc", cached=2), asks("hello"), sink=sink)
    assert sample(sink, "antiphon_prompt_tokens_total") == 5
    assert sample(sink, "antiphon_cached_tokens_total") == 2
    assert sample(sink, "antiphon_generation_tokens_total") == 4
    assert sample(sink, "antiphon_time_to_first_token_seconds_count") == 1
    assert sample(sink, "antiphon_inter_token_latency_seconds_count") == 3
    assert sample(sink, "antiphon_e2e_request_latency_seconds_count") == 1


def test_logprobs_come_with_their_tokens():
    sampling = SamplingParams(max_new_tokens=0, logprobs=True, top_logprobs=2)
    request = msgspec.structs.replace(asks(), sampling=sampling)
    events, _, _ = answer(says("é", size=1), request)
    first = events[0]
    assert (first.text, first.token_ids) == ("é", tuple("é".encode()))
    assert [(t.token_id, t.data) for t in first.logprobs] == [(0xC3, b"\xc3"), (0xA9, b"\xa9")]
    assert [t.text for t in first.logprobs[0].top] == ["A", "B"]
