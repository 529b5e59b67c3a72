"""What no front lets through, with the field at fault."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from core.errors import RequestError
from core.wire import SamplingParams
from router.rules import check
from router.text.request import (
    MAX_BIASES,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    ServedModel,
    TextRequest,
)

MODEL = ServedModel(name="tiny", context_len=100, vocab_size=258)
NAN = float("nan")


def asks(sampling: dict[str, Any], **fields: Any) -> TextRequest:
    plain = TextRequest(
        rid="r", prompts=("x",), sampling=SamplingParams(max_new_tokens=0, **sampling)
    )
    return msgspec.structs.replace(plain, **fields)


@pytest.mark.parametrize(
    ("param", "name", "values"),
    [
        ("temperature", "temperature", (-0.1, 2.1, NAN, float("inf"))),
        ("top_p", "top_p", (0.0, 1.1, NAN)),
        ("top_k", "top_k", (-1,)),
        ("min_p", "min_p", (-0.1, 1.1, NAN)),
        ("repetition_penalty", "repetition_penalty", (0.0, -1.0, 101.0, NAN)),
        ("presence_penalty", "presence_penalty", (-2.1, 2.1, NAN)),
        ("frequency_penalty", "frequency_penalty", (-2.1, 2.1, NAN)),
        ("min_tokens", "min_new_tokens", (-1,)),
        ("prompt_logprobs", "prompt_logprobs", (-1, MAX_TOP_LOGPROBS + 1)),
        ("stop_token_ids", "stop_token_ids", ((-1,), (258,), (1,) * (MAX_STOP_TOKENS + 1))),
        (
            "logit_bias",
            "logit_bias",
            (((-1, 0.0),), ((258, 0.0),), ((1, 100.5),), ((1, -101.0),), ((1, NAN),)),
        ),
        ("logit_bias", "logit_bias", (((1, 0.0),) * (MAX_BIASES + 1),)),
        ("top_logprobs", "top_logprobs", (-1, 2)),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(param, name, values):
    for value in values:
        with pytest.raises(RequestError, match=f"^{param} ") as caught:
            check(asks({name: value}), MODEL)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompts": ()}),
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("max_tokens", {"max_new_tokens": 0}),
        ("max_tokens", {"max_new_tokens": -1, "echo": True}),
        ("stop", {"stops": ("",)}),
        ("stop", {"stops": ("x",) * (MAX_STOPS + 1)}),
    ],
)
def test_a_request_that_breaks_a_rule_is_named(param, fields):
    with pytest.raises(RequestError, match=f"^{param} ") as caught:
        check(asks({}, **fields), MODEL)
    assert caught.value.param == param


def test_the_ends_of_the_ranges_pass():
    for sign in (-1, 1):
        check(
            asks(
                {
                    "min_p": float(sign == 1),
                    "repetition_penalty": 0.01 if sign < 0 else 100.0,
                    "presence_penalty": 2.0 * sign,
                    "frequency_penalty": 2.0 * sign,
                    "logit_bias": ((0, 100.0 * sign), (257, 100.0 * sign)),
                    "stop_token_ids": (0, 257),
                    "prompt_logprobs": 0 if sign < 0 else MAX_TOP_LOGPROBS,
                }
            ),
            MODEL,
        )
    check(asks({}, max_new_tokens=0, echo=True), MODEL)
