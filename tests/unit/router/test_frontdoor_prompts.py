"""Through the front door: echoed and scored prompts, scoring alone, the least output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from core.errors import RequestError
from core.wire import FinishReason, SamplingParams, TokenChunk, TokenLogprob
from router.frontdoor import FrontDoor
from router.text.request import TextEvent, TextRequest, TextUsage
from tests.support.doors import make_door
from tests.support.eventually import run_tidy
from tests.support.fake_streams import Call, FakeStreams, says


def answer(
    script: Any, sampling: dict[str, Any], prompts: tuple = ("hello",), **fields: Any
) -> tuple[list[TextEvent], TextUsage, FakeStreams]:
    streams = FakeStreams(script)
    request = TextRequest(
        rid="r",
        prompts=prompts,
        sampling=SamplingParams(max_new_tokens=0, **sampling),
        **fields,
    )
    events: list[TextEvent] = []
    usages: list[TextUsage] = []

    async def main() -> None:
        door: FrontDoor = make_door(streams, context_len=200)
        async with door.open(request) as stream:
            async for step in stream:
                events.extend(step)
            usages.append(stream.usage)

    run_tidy(main)
    return events, usages[0], streams


def test_a_prompt_comes_back_with_the_first_event_of_each_choice_and_is_scored_once():
    events, usage, streams = answer(
        says("ok"), {"prompt_logprobs": 1}, ("abc", "xy"), n=2, echo=True
    )
    for index, text in enumerate(("abc", "abc", "xy", "xy")):
        own = [event.prompt for event in events if event.index == index]
        assert own[0].text == text
        assert own[0].first.text == text[0]
        assert [t.text for t in own[0].rest] == list(text[1:])
        assert [t.logprob for t in own[0].rest] == [-1.0, -2.0][: len(text) - 1]
        assert own[1:] == [None] * (len(own) - 1)
    asked = {call.rid: call.params.prompt_logprobs for call in streams.calls}
    assert asked == {"r-0": 1, "r-1": None, "r-2": 1, "r-3": None}
    assert usage.prompt_tokens == 5


def test_the_other_choices_wait_for_the_scores_of_a_short_prompt():
    log: list[str] = []

    def script(call: Call) -> Iterator[TokenChunk]:
        log.append(f"open {call.rid}")
        scores = (TokenLogprob(logprob=-1.0),) if call.params.prompt_logprobs is not None else ()
        yield TokenChunk(rid="", offset=0, token_ids=(65,), prompt_logprobs=scores)
        log.append(f"{call.rid} has a token")
        yield TokenChunk(rid="", offset=1, token_ids=(257,), finish=FinishReason.STOP)

    events, _, _ = answer(script, {"prompt_logprobs": 0}, ("ab",), n=2)
    assert log[:3] == ["open r-0", "r-0 has a token", "open r-1"]
    assert [len(e.prompt.rest) for e in events if e.prompt is not None] == [1, 1]


def test_without_asking_no_prompt_comes_back():
    events, _, streams = answer(says("ok"), {})
    assert all(event.prompt is None for event in events)
    assert streams.calls[0].params.prompt_logprobs is None


@pytest.mark.parametrize("eos", [257, None])
def test_scoring_alone_drops_the_token_that_the_worker_needs(eos):
    events, usage, streams = answer(
        says("x", eos=eos), {"prompt_logprobs": 0}, max_new_tokens=0, echo=True
    )
    (event,) = events
    assert (event.text, event.token_ids, event.finish) == ("", (), FinishReason.LENGTH)
    assert (event.prompt.text, len(event.prompt.rest)) == ("hello", 4)
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 0)
    assert streams.calls[0].params.max_new_tokens == 1


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize(
    ("least", "text"), [(0, ""), (1, "a"), (2, "aa"), (3, "aaa"), (8, "aaaaaaaa")]
)
def test_a_stop_string_counts_after_the_least_output(size, least, text):
    events, usage, streams = answer(
        says("a" * 12, size=size), {"min_new_tokens": least}, stops=("a",)
    )
    assert "".join(event.text for event in events) == text
    assert (events[-1].finish, events[-1].matched_stop) == (FinishReason.STOP, "a")
    assert usage.completion_tokens == least + 1
    assert streams.calls[0].params.min_new_tokens == least


@pytest.mark.parametrize("limit", [3, None])
def test_the_least_output_must_fit_the_most(limit):
    most = 195 if limit is None else limit
    answer(says("ok"), {"min_new_tokens": most}, max_new_tokens=limit)
    with pytest.raises(RequestError, match=f"at most {most} tokens") as caught:
        answer(says("ok"), {"min_new_tokens": most + 1}, max_new_tokens=limit)
    assert caught.value.param == "min_tokens"


def test_offsets_of_output_tokens_follow_the_echoed_prompt():
    events, _, _ = answer(says("éb"), {"logprobs": True}, ("xy",), echo=True)
    offsets = [token.offset for event in events for token in event.logprobs]
    assert offsets == [2, 2, 3, 4]
    events, _, _ = answer(says("éb", size=9), {"logprobs": True}, ("xy",))
    assert [t.offset for event in events for t in event.logprobs] == [0, 0, 1, 2]


def test_a_top_k_beyond_the_vocabulary_is_the_vocabulary():
    _, _, streams = answer(says("ok"), {"top_k": 1 << 80})
    assert streams.calls[0].params.top_k == 258
