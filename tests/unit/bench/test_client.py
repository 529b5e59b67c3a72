"""The client: time stamps, every form of chunk, every way a stream can go wrong."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from bench.client import Access, Client, Request, connect
from bench.config import BenchConfig
from bench.sse import Lines, error_text
from core.clock import RealClock, VirtualClock
from core.errors import ConfigError, PreflightError
from tests.support.fake_openai import Answer, refuses, says, serving, sse, usage

REQUEST = Request("hi", 5, session=3, turn=1, due_s=99.0)


class TimedStream(httpx.AsyncByteStream):
    """Yields pieces; each comes ``seconds`` after the one before, on a virtual clock."""

    def __init__(self, clock, pieces):
        self.clock = clock
        self.pieces = pieces

    async def __aiter__(self):
        for seconds, data in self.pieces:
            self.clock.advance(seconds)
            yield data


def send_timed(pieces, **fields):
    """The outcome of a request whose answer comes in these timed pieces, sent at 100 s."""
    clock = VirtualClock(start=100.0)
    bodies = []

    def answer(request):
        bodies.append(request.content)
        return httpx.Response(200, stream=TimedStream(clock, pieces))

    async def main():
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(answer), base_url="http://fake"
        ) as http:
            return await Client(http, BenchConfig(model="m", **fields), clock).send(REQUEST)

    return asyncio.run(main())


def text(piece, finish=None):
    return sse({"choices": [{"index": 0, "text": piece, "finish_reason": finish}]})


def test_every_chunk_gets_its_time():
    pieces = [
        (0.5, text(" a")),
        (0.25, text(" b") + text(" c")),  # one read: one time
        (0.1, text("", "length")),
        (0.1, sse({"choices": [], "usage": usage(7, 3, cached=2)}) + sse("[DONE]")),
    ]
    outcome = send_timed(pieces)
    assert outcome.ok
    assert (outcome.session, outcome.turn, outcome.due_s) == (3, 1, 99.0)
    assert outcome.start_s == 100.0
    assert outcome.chunk_s == (100.5, 100.75, 100.75)
    assert outcome.end_s == pytest.approx(100.95)
    assert outcome.text == " a b c"
    assert outcome.finish == "length"
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (7, 3, 2)


def test_a_chunk_that_comes_in_pieces_has_the_time_of_its_end():
    whole = text(" a")
    outcome = send_timed([(1, whole[:20]), (1, whole[20:]), (1, text("", "stop")[:-2])])
    assert outcome.ok
    assert outcome.chunk_s == (102.0,)


def test_chat_chunks_reasoning_and_comments():
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "yes"}]
    pieces = [(1.0, sse({"choices": [{"delta": delta}]})) for delta in deltas]
    pieces.insert(0, (1.0, b": ping\r\n\r\nevent: x\r\n"))
    pieces.append((1.0, b'data:{"choices":[{"delta":{},"finish_reason":"stop"}]}\r\n\r\n'))
    outcome = send_timed(pieces, endpoint="chat")
    assert outcome.ok
    assert outcome.text == "hmyes"
    assert outcome.chunk_s == (103.0, 104.0)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([text(" a"), sse("[DONE]")], "the stream ended without a finish_reason"),
        ([], "the stream ended without a finish_reason"),
        ([text(" a"), sse({"error": {"message": "no page left"}})], "no page left"),
        ([text(" a"), sse("{nonsense")], "a chunk that is not OpenAI's"),
        ([text(" a", "abort")], "finish_reason abort"),
    ],
)
def test_a_stream_without_a_real_end_is_an_error(pieces, words):
    outcome = send_timed([(1.0, piece) for piece in pieces])
    assert not outcome.ok
    assert words in outcome.error


def use(script, work, **fields):
    """The result of ``work(client)`` on a client of a scripted endpoint, and the endpoint."""
    with serving(script) as fake:
        config = BenchConfig(url=fake.url, **fields)

        async def main():
            async with connect(config, RealClock(), Access("secret")) as client:
                await client.find_model()
                return await work(client)

        return asyncio.run(main()), fake


def send(client):
    return client.send(REQUEST)


def test_a_request_says_what_is_wanted():
    outcome, fake = use(
        lambda _: says(" x", usage=usage(1, 1)), send, extra_body={"top_k": 1}, temperature=0.5
    )
    assert outcome.ok
    assert fake.paths == ["/v1/completions"]
    assert fake.headers[0]["authorization"] == "Bearer secret"
    assert fake.bodies == [
        {
            "model": "fake-model",
            "prompt": "hi",
            "max_tokens": 5,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_k": 1,
        }
    ]


def test_chat_goes_to_chat_and_ignore_eos_can_be_left_out():
    _, fake = use(lambda _: says("x"), send, endpoint="chat", ignore_eos=False, model="mine")
    assert fake.paths == ["/v1/chat/completions"]
    assert fake.bodies[0]["messages"] == "hi"
    assert fake.bodies[0]["model"] == "mine"
    assert "ignore_eos" not in fake.bodies[0]


def test_a_refusal_is_told_with_its_words():
    outcome, _ = use(lambda _: refuses(429, "come back\n later"), send)
    assert outcome.error == "HTTP 429: come back later"


def test_a_connection_that_breaks_is_an_error():
    broken = Answer(says(" a", " b").events[:2], cut=True)
    outcome, _ = use(lambda _: broken, send)
    assert outcome.error.startswith("RemoteProtocolError: peer closed connection")
    assert outcome.text == " a b"


def test_a_connection_for_each_stream_that_runs_is_used_again():
    async def twice_three(client):
        for _ in range(2):
            outcomes = await asyncio.gather(*[client.send(REQUEST) for _ in range(3)])
            assert all(outcome.ok for outcome in outcomes)

    _, fake = use(lambda _: says("x"), twice_three, model="m")
    assert fake.connections == 3
    assert len(fake.bodies) == 6


def unused_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_where_nobody_answers_the_operator_is_told():
    async def main(**fields):
        config = BenchConfig(url=unused_url(), **fields)
        async with connect(config, RealClock(), Access()) as client:
            await client.find_model()
            return await client.send(REQUEST)

    with pytest.raises(PreflightError, match="antiphon serve"):
        asyncio.run(main())
    assert asyncio.run(main(model="m")).error.startswith("ConnectError: ")


@pytest.mark.parametrize("listing", [{"data": []}, [], {"models": 1}, "text"])
def test_an_endpoint_without_models_needs_a_name(listing):
    async def main():
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json=listing))
        async with httpx.AsyncClient(transport=transport, base_url="http://fake") as http:
            await Client(http, BenchConfig(), RealClock()).find_model()

    with pytest.raises(PreflightError, match="give --model"):
        asyncio.run(main())


def test_a_wrong_address_is_a_configuration_error():
    async def main():
        async with connect(BenchConfig(url="http://host:port"), RealClock(), Access()):
            raise AssertionError("unreachable")

    with pytest.raises(ConfigError, match="--url http://host:port"):
        asyncio.run(main())


def test_lines_are_cut_wherever_the_bytes_are():
    stream = b'data: {"a": 1}\r\n\r\n: note\ndata:2\n\nid: 4\ndata: [DONE]\n\n'
    for size in (1, 2, 3, 7, 100):
        lines, got = Lines(), []
        for at in range(0, len(stream), size):
            got += lines.feed(stream[at : at + size])
        assert got == [b'{"a": 1}', b"2", b"[DONE]"]
        assert lines.close() == []


def test_errors_in_every_form_have_words():
    assert error_text({"error": {"message": "a", "type": "b"}}) == "a"
    assert error_text({"object": "error", "message": "c"}) == "c"
    assert error_text({"detail": [{"msg": "d"}]}) == "[{'msg': 'd'}]"
    assert error_text("e  \n f") == "e f"
    assert error_text({"x": 1}) == "{'x': 1}"
