"""Echoed prompts, prompt log-probabilities and best_of, in the shapes clients know.

The token ids of the fake streams are bytes, so each character of a prompt is one token.
"""

from __future__ import annotations

from typing import Any

import pytest

from core.wire import FinishReason, TokenChunk, TokenLogprob
from tests.support.fake_streams import Call, says, with_scores
from tests.support.http_calls import CHAT, post, sse_events

OK = says("ok", eos=None)
ECHO: dict[str, Any] = {"prompt": "Say", "echo": True}


def completion(body: dict[str, Any], script: Any = OK) -> dict[str, Any]:
    response = post("/v1/completions", body, script)
    assert response.is_success, response.text
    return response.json()


def test_an_echo_with_logprobs_as_openai_writes_it():
    choice = completion(ECHO | {"logprobs": 1})["choices"][0]
    assert choice == {
        "index": 0,
        "text": "Sayok",
        "logprobs": {
            "tokens": ["S", "a", "y", "o", "k"],
            "token_logprobs": [None, -1.0, -2.0, -0.5, -0.5],
            "top_logprobs": [
                None,
                {"A": -0.25, "a": -1.0},
                {"A": -0.25, "y": -2.0},
                {"A": -1.0, "o": -0.5},
                {"A": -1.0, "k": -0.5},
            ],
            "text_offset": [0, 1, 2, 3, 4],
        },
        "finish_reason": "length",
        "matched_stop": None,
    }


def test_an_echo_without_alternatives_or_without_logprobs():
    logprobs = completion(ECHO | {"logprobs": 0})["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert logprobs["token_logprobs"][:2] == [None, -1.0]
    plain = completion(ECHO)["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("Sayok", None)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [([83, 97], ["Saok"]), ([[83], "é".encode()], ["Sok", "éok"]), (["S", "é"], ["Sok", "éok"])],
)
def test_every_form_of_prompt_is_echoed(prompt, texts):
    prompt = [list(p) if isinstance(p, bytes) else p for p in prompt]
    choices = completion({"prompt": prompt, "echo": True, "logprobs": 0})["choices"]
    assert [c["text"] for c in choices] == texts
    for choice, text in zip(choices, texts, strict=True):
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert len(tokens) == len(text.encode())
        assert offsets[-2:] == [len(text) - 2, len(text) - 1]


def test_offsets_point_into_the_text_of_an_echo():
    choice = completion({"prompt": "aéb", "echo": True, "logprobs": 0}, says("éc", eos=None))
    choice = choice["choices"][0]
    assert choice["text"] == "aébéc"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 3, 4]
    assert choice["logprobs"]["tokens"][1:3] == ["bytes:\\xc3", "bytes:\\xa9"]


@pytest.mark.parametrize("script", [says("x"), says("x", eos=None), says("", eos=257)])
def test_scoring_alone(script):
    body = completion(ECHO | {"max_tokens": 0, "logprobs": 1}, script)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Say", "length")
    assert choice["logprobs"]["tokens"] == ["S", "a", "y"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)


def test_a_streamed_echo_begins_with_the_prompt():
    body = ECHO | {"logprobs": 1, "n": 2, "stream": True}
    chunks = sse_events(post("/v1/completions", body, says("ok")))
    whole = completion(ECHO | {"logprobs": 1, "n": 2}, says("ok"))["choices"]
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [c["text"] for c in own] == ["Say", "o", "k", ""]
        assert own[0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
        assert own[0]["finish_reason"] is None
        for field, values in whole[index]["logprobs"].items():
            assert [v for c in own for v in c["logprobs"][field]] == values
    ends = sse_events(post("/v1/completions", ECHO | {"max_tokens": 0, "stream": True}))
    ends = [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in ends]
    assert ends == [("Say", None), ("", "length")]


def test_prompt_logprobs_of_a_completion():
    body = completion({"prompt": ["abA", "x"], "prompt_logprobs": 2, "n": 2})
    first = body["choices"][0]
    assert first["text"] == "ok"
    assert first["logprobs"] is None
    top = {
        "65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"},
        "66": {"logprob": -1.25, "rank": 2, "decoded_token": "B"},
    }
    chosen = {"98": {"logprob": -1.0, "rank": None, "decoded_token": "b"}}
    assert first["prompt_logprobs"] == [None, chosen | top, top]
    assert next(iter(first["prompt_logprobs"][1])) == "98"  # the prompt's own token leads
    assert body["choices"][1]["prompt_logprobs"] == first["prompt_logprobs"]
    assert [c["prompt_logprobs"] for c in body["choices"][2:]] == [[None], [None]]
    assert "prompt_logprobs" not in completion({"prompt": "a"})["choices"][0]


def test_echo_and_prompt_logprobs_each_have_their_number_of_alternatives():
    choice = completion(ECHO | {"logprobs": 3, "prompt_logprobs": 0})["choices"][0]
    assert [len(entry or ()) for entry in choice["prompt_logprobs"]] == [0, 1, 1]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 4  # three, and the prompt's own
    choice = completion(ECHO | {"logprobs": 0, "prompt_logprobs": 2})["choices"][0]
    assert [len(entry or ()) for entry in choice["prompt_logprobs"]] == [0, 3, 3]


def test_prompt_logprobs_of_a_chat():
    body = post("/v1/chat/completions", CHAT | {"prompt_logprobs": 0, "n": 2}).json()
    prompt = "<user>hi\n<assistant>"
    own = [next(iter(entry.values()))["decoded_token"] for entry in body["prompt_logprobs"][1:]]
    assert body["prompt_logprobs"][0] is None
    assert "".join(own) == prompt[1:]
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["completion_tokens"] == 6
    assert "prompt_logprobs" not in post("/v1/chat/completions", CHAT).json()


def ranked(call: Call) -> list[TokenChunk]:
    """Choice i of a prompt says the letter i, twice for odd i; later choices are likelier."""
    index = int(call.rid.rpartition("-")[2]) % 4
    count = 1 + index % 2
    logprobs = tuple(TokenLogprob(logprob=(index - 4.0)) for _ in range(count))
    ids = (ord("a") + index,) * count
    chunk = TokenChunk(
        rid="", offset=0, token_ids=ids, logprobs=logprobs, finish=FinishReason.LENGTH
    )
    return [with_scores(chunk, call)]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_best_choices_by_their_mean_come_first(logprobs):
    asked = {"prompt": ["p", "qq"], "n": 2, "best_of": 4, "logprobs": logprobs}
    body = completion(asked, ranked)
    got = [(c["index"], c["text"]) for c in body["choices"]]
    # the sum would put "c" (-2) and "dd" (-2) level, and "b" (-6) after "a" (-4)
    assert got == [(0, "dd"), (1, "c"), (2, "dd"), (3, "c")]
    assert all((c["logprobs"] is None) == (logprobs is None) for c in body["choices"])
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 2 * (1 + 2 + 1 + 2)  # all that were generated


def test_best_of_three_by_mean_not_by_sum():
    body = completion({"prompt": "p", "n": 3, "best_of": 4}, ranked)
    assert [c["text"] for c in body["choices"]] == ["dd", "c", "bb"]


def test_best_of_with_echo():
    body = completion(ECHO | {"best_of": 4, "logprobs": 0}, ranked)
    (choice,) = body["choices"]
    assert choice["text"] == "Saydd"
    assert choice["logprobs"]["tokens"] == ["S", "a", "y", "d", "d"]
