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
        with pytest.raises(openai.APIError, match="the worker was lost"):
            async for _ in await client.chat.completions.create(**ASKED, stream=True):
                pass

    run(use, lambda call: [*first, failure(ErrorKind.UNAVAILABLE, "the worker was lost")])
