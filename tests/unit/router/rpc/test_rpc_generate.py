"""Generate and Chat over a real connection, with the generated client."""

from __future__ import annotations

import asyncio

import pytest

from core.wire import FinishReason
from router.rpc import convert
from router.rpc.gen import antiphon_pb2 as pb
from router.text.request import (
    ChosenToken,
    PromptText,
    SamplingDefaults,
    TextEvent,
    TextUsage,
    Token,
    TokenText,
)
from tests.support.doors import TEMPLATE
from tests.support.fake_streams import Call, chunk, says
from tests.support.rpc_calls import (
    Client,
    all_of,
    asks,
    call,
    deltas_of,
    generate,
    says_hi,
    text_of,
)


def test_text_comes_back_with_ids_reason_and_usage():
    messages = generate(asks("hello", request_id="mine"), says("hé!", cached=3))
    assert text_of(messages) == "hé!"
    assert [i for d in deltas_of(messages) for i in d.token_ids] == [*"hé!".encode(), 257]
    last = deltas_of(messages)[-1]
    assert (last.finish_reason, last.matched_token_id) == (pb.FINISH_REASON_STOP, 257)
    assert {message.request_id for message in messages} == {"mine"}
    assert messages[-1].usage == pb.Usage(prompt_tokens=5, completion_tokens=5, cached_tokens=3)


def test_token_ids_go_in_as_they_are_and_options_reach_the_worker():
    async def use(client: Client) -> Call:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[256, 7, 8]),
            options=pb.GenerationOptions(
                max_tokens=4,
                temperature=0.7,
                top_p=0.9,
                top_k=3,
                seed=-1,
                stop_token_ids=[9],
                ignore_eos=True,
                model="owner/tiny",
                min_p=0.1,
                repetition_penalty=1.2,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                logit_bias={65: 5, 3: -5},
                min_tokens=2,
            ),
        )
        await all_of(client.stub.Generate(request))
        return client.streams.calls[0]

    asked = call(use)
    assert asked.token_ids == [256, 7, 8]
    params = asked.params
    assert (params.max_new_tokens, params.temperature, params.top_p) == (4, 0.7, 0.9)
    assert (params.top_k, params.seed, params.stop_token_ids) == (3, (1 << 63) - 1, (9,))
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.logit_bias, params.min_new_tokens) == (((3, -5.0), (65, 5.0)), 2)
    assert params.prompt_logprobs is None
    assert params.ignore_eos
    assert not params.logprobs


def test_what_is_left_out_has_its_default():
    async def use(client: Client) -> Call:
        await all_of(client.stub.Generate(pb.GenerateRequest(text="hi")))
        return client.streams.calls[0]

    params = call(use).params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert (params.max_new_tokens, params.seed) == (998, 1000)
    assert (params.min_p, params.repetition_penalty, params.min_new_tokens) == (0, 1.0, 0)


def test_what_the_model_recommends_stands_for_what_is_left_out():
    async def use(client: Client) -> list[Call]:
        await all_of(client.stub.Generate(asks()))
        await all_of(client.stub.Chat(pb.ChatRequest(messages=[said])))
        return client.streams.calls

    said = pb.ChatMessage(role="user", content="hi")
    calls = call(use, sampling=SamplingDefaults(temperature=0.25))
    assert [each.params.temperature for each in calls] == [0.25, 0.25]


def test_zero_is_not_left_out():
    async def use(client: Client) -> Call:
        await all_of(client.stub.Generate(asks(temperature=0, seed=0)))
        return client.streams.calls[0]

    params = call(use).params
    assert (params.temperature, params.seed) == (0, 0)


def test_a_conversation_goes_through_the_template():
    async def use(client: Client) -> tuple[str, list]:
        request = says_hi()
        request.messages.add(role="tool", content="4", name="calculator")
        request.chat_template_kwargs.update({"depth": 5, "more": {"list": [1, 2.5, None, True]}})
        messages = await all_of(client.stub.Chat(request))
        return bytes(client.streams.calls[0].token_ids).decode(), messages

    template = TEMPLATE + "{{ messages[1].name }} {{ depth }} {{ more }}"
    prompt, messages = call(use, template=template)
    assert prompt == ("<user>hi\n<tool>4\n<assistant>calculator 5 {'list': [1, 2.5, None, True]}")
    assert text_of(messages) == "ok"
    assert messages[0].request_id.startswith("grpc-")


def test_every_choice_comes_with_a_seed_of_its_own():
    async def use(client: Client) -> tuple[list, list[int]]:
        messages = await all_of(client.stub.Generate(asks(n=3, seed=5)))
        return messages, sorted(c.params.seed for c in client.streams.calls)

    messages, seeds = call(use, lambda c: says("abc"[c.params.seed - 5])(c))
    assert [text_of(messages, i) for i in range(3)] == ["a", "b", "c"]
    assert seeds == [5, 6, 7]
    ends = [d.index for m in messages for d in m.choices if d.finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert messages[-1].usage.completion_tokens == 6


def test_logprobs_stand_beside_their_tokens():
    messages = generate(asks(logprobs=True, top_logprobs=2), says("é"))
    deltas = deltas_of(messages)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [e.token.token_id for e in entries] == [i for d in deltas for i in d.token_ids]
    assert [e.token.data for e in entries] == [b"\xc3", b"\xa9", b""]
    assert entries[0].token.logprob == -0.5
    assert [(t.token_id, t.data, t.logprob) for t in entries[0].top] == [
        (65, b"A", -1.0),
        (66, b"B", -2.0),
    ]


@pytest.mark.parametrize(("include", "shown"), [(False, "one"), (True, "one STOP")])
def test_a_stop_string_ends_the_text(include, shown):
    messages = generate(asks(stop=[" STOP"], include_stop=include), says("one STOP two"))
    last = deltas_of(messages)[-1]
    assert text_of(messages) == shown
    assert (last.finish_reason, last.matched_stop) == (pb.FINISH_REASON_STOP, " STOP")


def test_length_ends_it_without_a_match():
    last = deltas_of(generate(asks(), says("ab", eos=None)))[-1]
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    assert last.WhichOneof("matched") is None


def test_special_tokens_are_shown_on_demand():
    script = says("a", eos=256)  # a special token which does not end the text here

    async def use(client: Client) -> list[str]:
        kept = await all_of(client.stub.Generate(asks(keep_special_tokens=True)))
        left_out = await all_of(client.stub.Generate(asks()))
        return [text_of(kept), text_of(left_out)]

    # the byte tokenizer writes nothing for it, so look at what was asked of the detokenizer
    assert call(use, script) == ["a", "a"]
    asked = convert.generate_request(asks(keep_special_tokens=True), None)
    assert not asked.skip_special
    assert convert.generate_request(asks(), None).skip_special


def test_a_step_with_very_many_tokens_is_cut_into_messages():
    events = [
        TextEvent(index=i, text="x", token_ids=(1,) * 600, finish=FinishReason.LENGTH)
        for i in range(4)
    ]
    messages = list(convert.responses("r", events, TextUsage(completion_tokens=2400)))
    assert [[d.index for d in m.choices] for m in messages] == [[0], [1], [2], [3]]
    few = [TextEvent(index=i, text="x", token_ids=(1,) * 512) for i in range(4)]
    assert [len(m.choices) for m in convert.responses("r", few, TextUsage())] == [2, 2]


def test_the_prompt_comes_back_with_the_first_delta():
    messages = generate(asks("hé", echo=True, n=2), says("ok"))
    for index in (0, 1):
        first, *others = deltas_of(messages, index)
        assert (first.prompt.text, first.prompt.first_token_id) == ("hé", ord("h"))
        assert first.prompt.first_data == b"h"
        assert not any(delta.HasField("prompt") for delta in others)
    assert text_of(messages) == "ok"


def test_a_scored_prompt_has_logprobs_for_all_tokens_but_the_first():
    best = TokenText(token_id=66, data=b"B", logprob=-1.0)
    rest = (ChosenToken(token_id=105, data=b"i", logprob=-2.0, top=(best,)),)
    prompt = PromptText(first=Token(token_id=104, data=b"h"), rest=rest)
    event = TextEvent(index=0, prompt=prompt)
    ((delta,),) = (m.choices for m in convert.responses("r", [event], TextUsage()))
    (scored,) = delta.prompt.rest
    assert (scored.token.token_id, scored.token.logprob) == (105, -2.0)
    assert [top.data for top in scored.top] == [b"B"]
    asked = convert.generate_request(asks(prompt_logprobs=0), None)
    assert asked.sampling.prompt_logprobs == 0


def test_two_hundred_streams_at_once():
    def script(made: Call) -> list:
        text = bytes(made.token_ids)
        return [chunk(i, b) for i, b in enumerate(text)] + [
            chunk(len(text), 257, finish=FinishReason.STOP)
        ]

    async def use(client: Client) -> list[str]:
        calls = [client.stub.Generate(asks(f"stream {i} says so")) for i in range(200)]
        return [text_of(messages) for messages in await asyncio.gather(*map(all_of, calls))]

    assert call(use, script, limit=200) == [f"stream {i} says so" for i in range(200)]
