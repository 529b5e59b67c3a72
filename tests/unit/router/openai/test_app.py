"""The HTTP front over scripted token streams: answers and streams."""

from __future__ import annotations

import pytest

from core.metrics import PrometheusSink
from core.wire import FinishReason, SamplingParams
from router.readiness import Readiness
from router.text.request import SamplingDefaults
from tests.support.doors import http_client, make_door, services
from tests.support.eventually import run_tidy
from tests.support.fake_streams import FakeStreams, says
from tests.support.http_calls import CHAT, TEXT, error_of, get, post, sse_events


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


def test_what_the_model_recommends_reaches_the_worker():
    streams = FakeStreams(says("ok"))
    recommended = SamplingDefaults(temperature=0.25)

    async def main() -> None:
        async with http_client(services(make_door(streams, sampling=recommended))) as client:
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
                assert (await client.post(path, json=body)).is_success

    run_tidy(main)
    assert [c.params.temperature for c in streams.calls] == [0.25, 0.25]


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
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "logit_bias": {"65": 5, "257": -100},
        "min_tokens": 3,
        "prompt_logprobs": 4,
    }

    async def main() -> None:
        async with http_client(services(make_door(streams))) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT | wanted)).is_success
            absent = (
                "temperature", "top_p", "min_p", "logit_bias", "min_tokens", "prompt_logprobs",
                "repetition_penalty", "presence_penalty", "frequency_penalty", "echo", "best_of",
            )  # fmt: skip
            off = {"top_k": -1} | dict.fromkeys(absent)
            assert (await client.post("/v1/completions", json=TEXT | off)).is_success

    run_tidy(main)
    chat, text = (c.params for c in streams.calls)
    assert (chat.max_new_tokens, chat.temperature, chat.top_p, chat.top_k) == (7, 0.5, 0.9, 5)
    assert (chat.seed, chat.stop_token_ids, chat.ignore_eos) == (3, (9,), True)
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)
    assert (text.max_new_tokens, text.temperature, text.top_p, text.top_k) == (16, 1.0, 1.0, 0)
    assert text.logprobs is False
    assert (chat.min_p, chat.min_new_tokens, chat.prompt_logprobs) == (0.25, 3, 4)
    penalties = (chat.repetition_penalty, chat.presence_penalty, chat.frequency_penalty)
    assert penalties == (1.5, -2, 2)
    assert chat.logit_bias == ((65, 5.0), (257, -100.0))
    plain = SamplingParams(max_new_tokens=16, seed=1000)
    assert text == plain


def test_what_has_no_effect_here_is_taken():
    ignored = {
        "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "logit_bias": {}, "min_p": 0, "reasoning_effort": "low",
        "prompt_cache_key": "k", "parallel_tool_calls": False, "functions": None,
    }  # fmt: skip
    assert post("/v1/chat/completions", CHAT | ignored).is_success
    assert post("/v1/completions", TEXT | {"best_of": 2, "n": 2, "echo": False}).is_success


def test_the_models():
    card = get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("owner/tiny", "model", 1000)
    assert get("/v1/models/owner/tiny").json() == card


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
        return Readiness(ready=False, reason="no session with decode/0/0", told="not all there")

    assert get("/health").json() == {"status": "ok"}
    assert get("/ready").json() == {"status": "ready"}
    waiting = get("/ready", ready=not_ready)
    assert error_of(waiting, 503)["message"] == "not ready: not all there"
    assert "decode" not in waiting.text  # anybody may ask
    assert get("/status").json() == {"groups": 2}
    assert get("/version").json() == {"version": "1.2.3"}
    page = get("/metrics", sink=PrometheusSink())
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE antiphon_requests_total counter" in page.text


def test_the_schema_of_the_api_can_be_read():
    paths = get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths
