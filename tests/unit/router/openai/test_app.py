"""The HTTP front over a fake front door's streams: answers, streams and every kind of error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from core.errors import Unavailable
from core.metrics import PrometheusSink
from core.wire import ErrorKind, FinishReason
from router.openai.app import Readiness
from tests.support.doors import http_client, make_door, services
from tests.support.eventually import run_tidy
from tests.support.fake_streams import HANG, FakeStreams, chunk, failure, says

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
OK = says("ok")


def call(
    use: Callable[[httpx.AsyncClient], Awaitable[Any]],
    script: Callable = OK,
    *,
    door: dict[str, Any] | None = None,
    **wiring: Any,
) -> Any:
    """The result of ``use`` on a client of an app whose streams play ``script``."""
    results = []

    async def main() -> None:
        async with http_client(
            services(make_door(FakeStreams(script), **(door or {})), **wiring)
        ) as client:
            results.append(await use(client))

    run_tidy(main)
    return results[0]


def post(path: str, body: Any, script: Callable = OK, **wiring: Any) -> httpx.Response:
    return call(lambda client: client.post(path, json=body), script, **wiring)


def get(path: str, **wiring: Any) -> httpx.Response:
    return call(lambda client: client.get(path), **wiring)


def sse_events(response: httpx.Response) -> list[Any]:
    """The JSON of each event; the last must be ``[DONE]``, which is left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    datas = [e.removeprefix("data: ") for e in response.text.strip().split("\n\n")]
    assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_chat_answer():
    response = post("/v1/chat/completions", CHAT | {"model": "owner/tiny"}, says("hé", cached=4))
    body = response.json()
    assert response.headers["x-request-id"] == body["id"]
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hé", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": 257,
        }
    ]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 5, "owner/tiny")


def test_a_chat_stream():
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = sse_events(post("/v1/chat/completions", CHAT | options, says("hé")))
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "h"}, {"content": "é"}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "stop"]
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


def test_usage_in_every_chunk_on_demand():
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = sse_events(post("/v1/completions", TEXT | options, says("ab")))
    assert all(c["usage"]["prompt_tokens"] == 2 for c in chunks)
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    plain = sse_events(post("/v1/completions", TEXT | {"stream": True}))
    assert all("usage" not in c for c in plain)


def test_several_choices_carry_their_index():
    chunks = sse_events(post("/v1/chat/completions", CHAT | {"stream": True, "n": 3}))
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == "ok"
        assert own[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens", "choices"),
    [("hi", 2, 2), (["hi", "x"], 3, 4), ([1, 2, 3], 3, 2), ([[1], [2, 3]], 3, 4)],
)
def test_every_form_of_prompt(prompt, prompt_tokens, choices):
    body = post("/v1/completions", {"prompt": prompt, "n": 2, "max_tokens": 9}).json()
    assert body["object"] == "text_completion"
    assert [c["index"] for c in body["choices"]] == list(range(choices))
    assert {c["text"] for c in body["choices"]} == {"ok"}
    assert body["usage"]["prompt_tokens"] == prompt_tokens
    assert body["usage"]["completion_tokens"] == 3 * choices


def test_parameters_reach_the_worker():
    streams = FakeStreams(says("ok"))
    wanted = {
        "max_completion_tokens": 7,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 3,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
    }

    async def main() -> None:
        async with http_client(services(make_door(streams))) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT | wanted)).is_success
            off = {"top_k": -1, "temperature": None, "top_p": None}
            assert (await client.post("/v1/completions", json=TEXT | off)).is_success

    run_tidy(main)
    chat, text = (c.params for c in streams.calls)
    assert (chat.max_new_tokens, chat.temperature, chat.top_p, chat.top_k) == (7, 0.5, 0.9, 5)
    assert (chat.seed, chat.stop_token_ids, chat.ignore_eos) == (3, (9,), True)
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)
    assert (text.max_new_tokens, text.temperature, text.top_p, text.top_k) == (16, 1.0, 1.0, 0)
    assert text.logprobs is False


def test_what_has_no_effect_here_is_taken():
    ignored = {
        "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "logit_bias": {}, "min_p": 0, "reasoning_effort": "low",
        "prompt_cache_key": "k", "parallel_tool_calls": False, "functions": None,
    }  # fmt: skip
    assert post("/v1/chat/completions", CHAT | ignored).is_success
    assert post("/v1/completions", TEXT | {"best_of": 2, "n": 2, "echo": False}).is_success


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"1": 2}),
        ("min_p", 0.1),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("tool_choice", "required"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_served_yet_is_refused_by_name(field, value, stream):
    error = error_of(post("/v1/completions", TEXT | {field: value, "stream": stream}), 400)
    assert error["param"] == field
    assert field in error["message"]
    assert "not supported yet" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "x"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": "y"}]}, "messages[0].role"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
        ("/v1/completions", {"prompt": [True]}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [258]}, "prompt"),
        ("/v1/completions", {"prompt": [1 << 70]}, "prompt"),
        ("/v1/completions", TEXT | {"max_tokens": 2000}, "prompt"),
        ("/v1/completions", TEXT | {"temperature": -1}, "temperature"),
        ("/v1/completions", TEXT | {"temperature": "hot"}, "temperature"),
        ("/v1/completions", TEXT | {"top_p": 0}, "top_p"),
        ("/v1/completions", TEXT | {"top_k": -2}, "top_k"),
        ("/v1/completions", TEXT | {"n": 129}, "n"),
        ("/v1/completions", TEXT | {"logprobs": 21}, "logprobs"),
        ("/v1/completions", TEXT | {"stop": ["x"] * 17}, "stop"),
        ("/v1/completions", TEXT | {"stop": ""}, "stop"),
        ("/v1/completions", TEXT | {"seed": 1 << 63}, "seed"),
        ("/v1/completions", TEXT | {"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_body_is_400_and_names_the_field(path, body, param, stream):
    error = error_of(post(path, body | {"stream": stream}), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b'"x"', b"\xff", b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_json_object_is_400(content):
    response = call(lambda client: client.post("/v1/completions", content=content))
    assert error_of(response, 400)["message"]


def test_the_context_length_is_named_with_its_code():
    error = error_of(post("/v1/completions", TEXT | {"max_tokens": 999}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "1000" in error["message"]


def test_an_unknown_model_is_404():
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        error = error_of(post(path, body | {"model": "gpt-5"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error_of(get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"


def test_the_models():
    card = get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("owner/tiny", "model", 1000)
    assert get("/v1/models/owner/tiny").json() == card


def test_unknown_routes_and_methods():
    assert "/v1/nothing" in error_of(get("/v1/nothing"), 404)["message"]
    response = get("/v1/completions")
    assert "GET" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"


def test_a_body_over_the_limit_is_413():
    text = "x" * (1 << 20)
    assert "body_limit_mib" in error_of(post("/v1/completions", {"prompt": text}), 413)["message"]

    async def pieces() -> Any:  # without a content-length
        yield b'{"prompt": "'
        yield text.encode()
        yield b'"}'

    response = call(lambda client: client.post("/v1/completions", content=pieces()))
    assert "body_limit_mib" in error_of(response, 413)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_house_is_429_with_the_time_to_come_back(stream):
    async def use(client: httpx.AsyncClient) -> httpx.Response:
        first = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        second = await client.post("/v1/completions", json=TEXT | {"stream": stream})
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return second

    response = call(use, lambda c: [chunk(0, 65), HANG], door={"limit": 1})
    assert error_of(response, 429)["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("step", "status"),
    [
        (Unavailable("no worker"), 503),
        (failure(ErrorKind.UNAVAILABLE, "no worker"), 503),
        (failure(ErrorKind.OVERLOADED, "no pages"), 429),
        (failure(ErrorKind.INVALID, "too long"), 400),
        (failure(ErrorKind.INTERNAL, "a defect"), 500),
    ],
)
def test_a_failure_before_the_first_token_has_its_status(step, status, stream):
    response = post("/v1/chat/completions", CHAT | {"stream": stream}, lambda c: [step])
    assert error_of(response, status)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_defect_is_500_without_its_words(stream):
    def script(call: Any) -> Any:
        raise ZeroDivisionError("secret")

    error = error_of(post("/v1/completions", TEXT | {"stream": stream}, script), 500)
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("second", "code"),
    [(failure(ErrorKind.UNAVAILABLE, "lost"), "unavailable"), (None, "internal_error")],
)
def test_a_failure_in_the_middle_is_an_event_and_the_end(second, code):
    def script(call: Any) -> Any:
        yield chunk(0, 65)
        if second is None:
            raise ZeroDivisionError
        yield second

    response = post("/v1/chat/completions", CHAT | {"stream": True}, script)
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == code
    assert '"content":"A"' in events[-2]


def test_logprobs_of_a_chat():
    asked = CHAT | {"logprobs": True, "top_logprobs": 2}
    content = post("/v1/chat/completions", asked, says("é")).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert [(c["token"], c["bytes"], c["logprob"]) for c in content[:2]] == [
        ("\ufffd", [0xC3], -0.5),
        ("\ufffd", [0xA9], -0.5),
    ]
    assert [t["token"] for t in content[0]["top_logprobs"]] == ["A", "B"]
    chunks = sse_events(post("/v1/chat/completions", asked | {"stream": True}, says("é")))
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert [e for logprobs in streamed if logprobs for e in logprobs["content"]] == content


def test_logprobs_of_a_completion():
    asked = TEXT | {"logprobs": 1}
    logprobs = post("/v1/completions", asked, says("aé", eos=None)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"A": -1.0, "a": -0.5}
    assert logprobs["text_offset"][:2] == [0, 1]
    plain = post("/v1/completions", TEXT | {"logprobs": 0}, says("a")).json()["choices"][0]
    assert plain["logprobs"]["top_logprobs"] is None
    chunks = sse_events(post("/v1/completions", asked | {"stream": True}, says("ab", eos=None)))
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0], [1]]


def test_stop_strings():
    body = TEXT | {"stop": ["k", "zz"]}
    choice = post("/v1/completions", body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("o", "stop", "k")
    shown = post("/v1/completions", body | {"include_stop_str_in_output": True})
    assert shown.json()["choices"][0]["text"] == "ok"


def test_a_long_stop_reason():
    choice = post("/v1/completions", TEXT, says("ok", eos=None)).json()["choices"][0]
    assert choice["finish_reason"] == FinishReason.LENGTH


def test_health_readiness_status_version_and_metrics():
    async def not_ready() -> Readiness:
        return Readiness(ready=False, reason="no decode worker")

    assert get("/health").json() == {"status": "ok"}
    assert get("/ready").json() == {"status": "ready"}
    assert "no decode worker" in error_of(get("/ready", ready=not_ready), 503)["message"]
    assert get("/status").json() == {"groups": 2}
    assert get("/version").json() == {"version": "1.2.3"}
    page = get("/metrics", sink=PrometheusSink())
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE antiphon_requests_total counter" in page.text


def test_the_schema_of_the_api_can_be_read():
    paths = get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths
