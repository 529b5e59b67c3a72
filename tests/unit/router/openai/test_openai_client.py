"""The real client library of OpenAI understands the answers, streams and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from core.wire import ErrorKind
from tests.support.doors import http_client, make_door, services
from tests.support.eventually import run_tidy
from tests.support.fake_streams import FakeStreams, chunk, failure, says

ASKED: Any = {"model": "owner/tiny", "messages": [{"role": "user", "content": "hi"}]}
HELLO = says("hello é")


def run(use: Callable[[openai.AsyncOpenAI], Awaitable[None]], script: Callable = HELLO) -> None:
    async def main() -> None:
        async with http_client(services(make_door(FakeStreams(script)))) as http:
            client = openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
            )
            await use(client)

    run_tidy(main)


def test_chat():
    async def use(client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(**ASKED, n=2, logprobs=True, top_logprobs=1)
        assert [c.message.content for c in answer.choices] == ["hello é"] * 2
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "A"
        assert answer.usage.prompt_tokens_details.cached_tokens == 0

    run(use)


def test_chat_stream():
    async def use(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            **ASKED, stream=True, stream_options={"include_usage": True}, stop=" é"
        )
        chunks = [c async for c in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "hello"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage.completion_tokens == len("hello é".encode())

    run(use)


def test_completions_and_models():
    async def use(client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(model="owner/tiny", prompt=["a", "b"], logprobs=1)
        assert [c.text for c in answer.choices] == ["hello é"] * 2
        assert answer.choices[0].logprobs.tokens[0] == "h"
        assert [m.id async for m in client.models.list()] == ["owner/tiny"]
        assert (await client.models.retrieve("owner/tiny")).id == "owner/tiny"

    run(use)


def test_sampling_parameters_and_several_choices_of_one_prompt():
    async def use(client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(
            **ASKED,
            n=3,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"65": -100},
            extra_body={"min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2},
        )
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == len("<user>hi\n<assistant>")
        assert answer.usage.prompt_tokens_details.cached_tokens == 4
        assert answer.usage.completion_tokens == 3 * 3

    run(use, says("ok", cached=4))


def test_echo_and_best_of():
    async def use(client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(
            model="owner/tiny", prompt="ab", echo=True, logprobs=2, max_tokens=0
        )
        logprobs = answer.choices[0].logprobs
        assert answer.choices[0].text == "ab"
        assert (logprobs.tokens, logprobs.text_offset) == (["a", "b"], [0, 1])
        assert logprobs.token_logprobs == [None, -1.0]
        assert logprobs.top_logprobs[0] is None
        assert answer.usage.completion_tokens == 0
        best = await client.completions.create(
            model="owner/tiny", prompt="ab", n=2, best_of=3, echo=True
        )
        assert [c.text for c in best.choices] == ["abhello é"] * 2
        assert best.usage.completion_tokens == 3 * (len("hello é".encode()) + 1)
        scored = await client.chat.completions.create(**ASKED, extra_body={"prompt_logprobs": 1})
        assert scored.prompt_logprobs[0] is None
        assert scored.prompt_logprobs[1]["65"]["decoded_token"] == "A"
        stream = await client.completions.create(
            model="owner/tiny", prompt="ab", echo=True, stream=True
        )
        texts = [chunk.choices[0].text async for chunk in stream]
        assert (texts[0], "".join(texts)) == ("ab", "abhello é")

    run(use)


def test_errors_have_their_class():
    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(**ASKED | {"model": "gpt-5"})
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(**ASKED, temperature=-1)
        assert wrong.value.param == "temperature"

    run(use)


@pytest.mark.parametrize("first", [(), (chunk(0, 65),)], ids=["at once", "in the middle"])
def test_a_failed_stream_raises(first):
    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APIError, match="no worker could finish the request"):
            async for _ in await client.chat.completions.create(**ASKED, stream=True):
                pass

    run(use, lambda call: [*first, failure(ErrorKind.UNAVAILABLE, "the worker was lost")])
