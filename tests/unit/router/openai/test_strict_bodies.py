"""Nothing in a body is guessed: a value of another type is 400, with the field and the type."""

from __future__ import annotations

import math

import pytest

from tests.support.http_calls import CHAT, TEXT, error_of, post, post_bytes

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WHOLE = ("max_tokens", "top_k", "min_tokens", "seed", "n", "priority", "prompt_logprobs")
REAL = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
FLAGS = (
    "stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "no_stop_trim",
)  # fmt: skip


def refused(path: str, body: dict, field: str, wanted: str) -> None:
    error = error_of(post(path, body), 400)
    assert error["param"] == field
    assert error["message"].startswith(f"{field}")
    assert wanted in error["message"]


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("value", ["3", True, 3.5, [3]])
def test_a_whole_number_is_one(field, value):
    for path, body in ((CHATS, CHAT), (COMPLETIONS, TEXT)):
        refused(path, body | {field: value}, field, "valid integer")


@pytest.mark.parametrize("field", REAL)
@pytest.mark.parametrize("value", ["1", True])
def test_a_number_is_one(field, value):
    for path, body in ((CHATS, CHAT), (COMPLETIONS, TEXT)):
        refused(path, body | {field: value}, field, "valid number")


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", ["true", 1, 0.0])
def test_a_flag_is_one(field, value):
    for path, body in ((CHATS, CHAT), (COMPLETIONS, TEXT)):
        refused(path, body | {field: value}, field, "valid boolean")


@pytest.mark.parametrize(
    ("path", "body", "field", "wanted"),
    [
        (CHATS, CHAT | {"max_completion_tokens": "3"}, "max_completion_tokens", "valid integer"),
        (CHATS, CHAT | {"logprobs": 1}, "logprobs", "valid boolean"),
        (CHATS, CHAT | {"logprobs": True, "top_logprobs": "2"}, "top_logprobs", "valid integer"),
        (COMPLETIONS, TEXT | {"logprobs": True}, "logprobs", "valid integer"),
        (COMPLETIONS, TEXT | {"echo": "yes"}, "echo", "valid boolean"),
        (COMPLETIONS, TEXT | {"best_of": "2"}, "best_of", "valid integer"),
        (COMPLETIONS, TEXT | {"logit_bias": {"5": "1"}}, "logit_bias", "valid number"),
        (COMPLETIONS, TEXT | {"logit_bias": {"5": True}}, "logit_bias", "valid number"),
        (COMPLETIONS, TEXT | {"model": 5}, "model", "valid string"),
        (COMPLETIONS, TEXT | {"cache_salt": 5}, "cache_salt", "valid string"),
        (
            COMPLETIONS,
            TEXT | {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options",
            "valid boolean",
        ),
    ],
)
def test_fields_of_one_route(path, body, field, wanted):
    refused(path, body, field, wanted)


@pytest.mark.parametrize("field", [*WHOLE, *REAL, "stream", "cache_salt"])
def test_null_is_the_default(field):
    for path, body in ((CHATS, CHAT), (COMPLETIONS, TEXT)):
        assert post(path, body | {field: None}).is_success


def test_a_whole_number_may_be_written_with_a_point():
    """JSON has one kind of number, and a real one may be whole."""
    body = TEXT | {"max_tokens": 2.0, "seed": 5.0, "n": 2.0, "temperature": 1}
    answer = post(COMPLETIONS, body)
    assert answer.is_success
    assert len(answer.json()["choices"]) == 2


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("field", ["max_tokens", "temperature"])
def test_what_is_no_number_is_the_callers_error(field, number):
    assert not math.isfinite(float(number))
    content = f'{{"prompt": "x", "{field}": {number}}}'.encode()
    assert error_of(post_bytes(COMPLETIONS, content), 400)["message"]
