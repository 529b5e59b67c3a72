"""What a request samples by that does not say: the model's recommendation, or none."""

from __future__ import annotations

import json

import pytest

from core.config import RouterConfig
from core.errors import ModelError
from core.wire import SamplingParams
from router.openai import convert as http
from router.openai.schema import ChatBody, CompletionBody
from router.rpc import convert as rpc
from router.rpc.gen import antiphon_pb2 as pb
from router.text.defaults import FILE, sampling_defaults
from router.text.request import NEUTRAL, SamplingDefaults

WARM = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05)
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read(tmp_path, *, source="model", **generation) -> SamplingDefaults:
    (tmp_path / FILE).write_text(json.dumps(generation))
    return sampling_defaults(RouterConfig(sampling_defaults=source), tmp_path)


def chosen(params: SamplingParams) -> list[float]:
    return [getattr(params, name) for name in NAMES]


def test_the_file_of_the_model_decides(tmp_path):
    more = {"eos_token_id": [1, 2], "do_sample": True, "max_new_tokens": 7}
    said = {name: getattr(WARM, name) for name in NAMES}
    assert read(tmp_path, **said, **more) == WARM
    assert read(tmp_path, **said, source="none") == NEUTRAL
    assert read(tmp_path, temperature=0, top_p=None, top_k=-1) == SamplingDefaults(temperature=0.0)
    assert read(tmp_path, eos_token_id=1) == NEUTRAL


def test_without_the_file_nothing_is_recommended(tmp_path):
    assert sampling_defaults(RouterConfig(), tmp_path) == NEUTRAL


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"temperature": 3}, {"top_p": 1.5}])
def test_a_recommendation_that_no_request_may_ask_for(wrong, tmp_path):
    with pytest.raises(ModelError, match=rf"{FILE}: .*router\.sampling_defaults=none"):
        read(tmp_path, **wrong)


def requests(**fields):
    """The same over every call of both fronts."""
    text = CompletionBody(prompt="x", **fields)
    chat = ChatBody(messages=[], **fields)
    options = pb.GenerationOptions(**fields)
    yield http.completion_request(text, "", WARM)
    yield http.chat_request(chat, "", WARM)
    yield rpc.generate_request(pb.GenerateRequest(text="x", options=options), None, WARM)
    yield rpc.chat_request(pb.ChatRequest(options=options), None, WARM)


def test_it_stands_for_what_a_request_leaves_out():
    assert [chosen(asked.sampling) for asked in requests()] == [chosen(WARM.params())] * 4


def test_what_a_request_says_goes_before_it():
    plain = {name: getattr(NEUTRAL, name) for name in NAMES}
    assert [chosen(asked.sampling) for asked in requests(**plain)] == [list(plain.values())] * 4
