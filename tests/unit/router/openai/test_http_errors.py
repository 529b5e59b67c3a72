"""Every way an HTTP request can fail has its status and OpenAI's envelope."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from core.errors import Unavailable
from core.wire import ErrorKind
from tests.support.fake_streams import HANG, chunk, failure
from tests.support.http_calls import CHAT, TEXT, call, error_of, get, post, post_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
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
        ("/v1/completions", TEXT | {"temperature": 2.1}, "temperature"),
        ("/v1/completions", TEXT | {"temperature": "hot"}, "temperature"),
        ("/v1/completions", TEXT | {"top_p": 0}, "top_p"),
        ("/v1/completions", TEXT | {"top_k": -2}, "top_k"),
        ("/v1/completions", TEXT | {"n": 129}, "n"),
        ("/v1/completions", TEXT | {"logprobs": 21}, "logprobs"),
        ("/v1/completions", TEXT | {"stop": ["x"] * 17}, "stop"),
        ("/v1/completions", TEXT | {"stop": ""}, "stop"),
        ("/v1/completions", TEXT | {"seed": 1 << 63}, "seed"),
        ("/v1/completions", TEXT | {"stop_token_ids": [-1]}, "stop_token_ids"),
        ("/v1/completions", TEXT | {"stop_token_ids": [258]}, "stop_token_ids"),
        ("/v1/completions", TEXT | {"min_p": 1.5}, "min_p"),
        ("/v1/completions", TEXT | {"repetition_penalty": 0}, "repetition_penalty"),
        ("/v1/completions", TEXT | {"presence_penalty": 2.1}, "presence_penalty"),
        ("/v1/chat/completions", CHAT | {"frequency_penalty": -3}, "frequency_penalty"),
        ("/v1/chat/completions", CHAT | {"frequency_penalty": "x"}, "frequency_penalty"),
        ("/v1/chat/completions", CHAT | {"logit_bias": {"258": 1}}, "logit_bias"),
        ("/v1/chat/completions", CHAT | {"logit_bias": {"-1": 1}}, "logit_bias"),
        ("/v1/chat/completions", CHAT | {"logit_bias": {"1": 101}}, "logit_bias"),
        ("/v1/chat/completions", CHAT | {"logit_bias": {"hi": 1}}, "logit_bias"),
        ("/v1/chat/completions", CHAT | {"logit_bias": [1]}, "logit_bias"),
        ("/v1/completions", TEXT | {"logit_bias": {str(1 << 70): 1}}, "logit_bias"),
        ("/v1/completions", TEXT | {"min_tokens": -1}, "min_tokens"),
        ("/v1/completions", TEXT | {"min_tokens": 17}, "min_tokens"),
        ("/v1/chat/completions", CHAT | {"min_tokens": 1000}, "min_tokens"),
        ("/v1/completions", TEXT | {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/chat/completions", CHAT | {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", TEXT | {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", TEXT | {"max_tokens": -1, "echo": True}, "max_tokens"),
        ("/v1/chat/completions", CHAT | {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", TEXT | {"best_of": 1, "n": 2}, "best_of"),
        ("/v1/completions", TEXT | {"best_of": 0}, "best_of"),
        ("/v1/completions", TEXT | {"best_of": 129}, "best_of"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_body_is_400_and_names_the_field(path, body, param, stream):
    error = error_of(post(path, body | {"stream": stream}), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", TEXT | {"best_of": 3, "n": 2}, "best_of"),
        ("/v1/completions", TEXT | {"prompt_logprobs": 0}, "prompt_logprobs"),
        ("/v1/chat/completions", CHAT | {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_streamed_is_refused_there_alone(path, body, param):
    assert error_of(post(path, body | {"stream": True}), 400)["param"] == param
    assert post(path, body).is_success


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", TEXT | {"temperature": 3}, "temperature must be between 0 and 2"),
        ("/v1/completions", TEXT | {"seed": 1 << 63}, f"{-(1 << 63)} and {(1 << 63) - 1}"),
        ("/v1/completions", {"prompt": "\ud800"}, "half of a surrogate pair (U+D800)"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0] is a text part: it needs `text`",
        ),
    ],
)
def test_the_message_says_what_is_wrong(path, body, words):
    message = error_of(post_bytes(path, json.dumps(body).encode()), 400)["message"]
    assert words in message
    assert "codec" not in message


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("best_of", 2)])
def test_what_only_completions_have_is_refused_in_a_chat(field, value):
    error = error_of(post("/v1/chat/completions", CHAT | {field: value}), 400)
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b'"x"', b"\xff"])
def test_a_body_that_is_no_json_object_is_400(content):
    assert error_of(post_bytes("/v1/completions", content), 400)["message"]


def test_a_body_of_another_type_is_400():
    response = call(lambda client: client.post("/v1/completions", data={"prompt": "x"}))
    assert "Content-Type: application/json" in error_of(response, 400)["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", TEXT | {"prompt": "\ud800"}, 400),
        ("/v1/completions", TEXT | {"model": "\ud800"}, 404),
        ("/v1/completions", TEXT | {"stop": "\ud800"}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "\ud800", "content": "x"}]}, 400),
    ],
)
def test_half_a_surrogate_pair_is_the_callers_error(path, body, status):
    error_of(post_bytes(path, json.dumps(body).encode()), status)


def test_the_context_length_is_named_with_its_code():
    error = error_of(post("/v1/completions", TEXT | {"max_tokens": 999}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "1000" in error["message"]


def test_an_unknown_model_is_404():
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        error = error_of(post(path, body | {"model": "gpt-5"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error_of(get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"


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

    response = post_bytes("/v1/completions", pieces())
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
