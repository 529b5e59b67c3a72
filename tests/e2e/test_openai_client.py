"""The preset cpu, as a user of the openai package sees it."""

from __future__ import annotations

import json
import subprocess

import openai
import pytest

from tests.support.served import ANTIPHON, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = "one two three four five six seven eight"


def test_the_start_says_what_matters_and_nothing_else(smollm):
    """Ray passes on what workers print; idle ones it ends may crash, Mooncake logs non-errors."""
    before, found, _ = smollm.log.partition(f"ready: {smollm.model}")
    assert found
    noise = ("(pid=", "(raylet)", "(WorkerActor", "Traceback", "SIGABRT", "descriptor")
    assert not [line for line in before.splitlines() if any(word in line for word in noise)]


def test_a_streamed_chat_answer_names_paris(smollm):
    with smollm.client() as client:
        chunks = list(
            client.chat.completions.create(
                model=smollm.model,
                messages=FRANCE,
                temperature=0,
                max_tokens=32,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "Paris" in "".join(pieces)
    assert sum(map(bool, pieces)) > 3, "it came in one piece"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens > 3


def test_the_whole_answer_is_the_streamed_one_and_its_usage_adds_up(smollm):
    asked = {"model": smollm.model, "messages": FRANCE, "temperature": 0, "max_tokens": 32}
    with smollm.client() as client:
        whole = client.chat.completions.create(**asked)
        streamed = client.chat.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert whole.choices[0].message.content == text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_a_shared_prefix_is_computed_once(smollm):
    prefix = [100 + 7 * i % 3000 for i in range(1000)]
    cached = []
    with smollm.client() as client:
        for last in (11, 12):
            answer = client.completions.create(
                model=smollm.model, prompt=[*prefix, last], max_tokens=2, temperature=0
            )
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] < 100
    assert cached[1] >= 900


def test_a_completion_carries_logprobs_of_what_it_chose(smollm):
    with smollm.client() as client:
        answer = client.completions.create(
            model=smollm.model, prompt=COUNT, max_tokens=4, temperature=0, logprobs=3
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 4
    assert "".join(choice.logprobs.tokens) == choice.text
    for chosen, best in zip(
        choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert len(best) == 3
        assert chosen == max(best.values()) <= 0


def test_chat_logprobs_stand_beside_the_tokens(smollm):
    with smollm.client() as client:
        answer = client.chat.completions.create(
            model=smollm.model,
            messages=FRANCE,
            temperature=0,
            max_tokens=5,
            logprobs=True,
            top_logprobs=2,
        )
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)


def test_a_stop_string_ends_the_answer_and_is_not_in_it(smollm):
    asked = {"model": smollm.model, "prompt": COUNT, "max_tokens": 24, "temperature": 0}
    with smollm.client() as client:
        free = client.completions.create(**asked).choices[0]
        word = free.text.split()[2]
        stopped = client.completions.create(**asked, stop=[word]).choices[0]
    assert stopped.text == free.text[: free.text.index(word)]
    assert stopped.finish_reason == "stop"


def test_n_answers_differ_and_a_seed_repeats_them(smollm):
    asked = {
        "model": smollm.model,
        "messages": [{"role": "user", "content": "Tell me a story about the sea."}],
        "temperature": 1.0,
        "max_tokens": 16,
        "n": 2,
        "seed": 7,
    }
    with smollm.client() as client:
        first, second = (client.chat.completions.create(**asked).choices for _ in range(2))
        other = client.chat.completions.create(**{**asked, "seed": 8}).choices
    texts = [[choice.message.content for choice in choices] for choices in (first, second, other)]
    assert [choice.index for choice in first] == [0, 1]
    assert texts[0][0] != texts[0][1]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_models_readiness_and_metrics(smollm):
    with smollm.client() as client:
        (card,) = client.models.list().data
    assert card.id == smollm.model == "SmolLM2-135M-Instruct"
    assert smollm.get("/ready").status_code == 200
    page = smollm.get("/metrics")
    assert page.status_code == 200
    assert 'rank="decode/0/0"' in page.text


def test_status_shows_that_kv_crossed(smollm):
    with smollm.client() as client:
        client.chat.completions.create(model=smollm.model, messages=FRANCE, max_tokens=4)
    command = [ANTIPHON, "status", "--url", smollm.url]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.startswith(f"{smollm.model}: ready")
    raw = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    loads = {rank["rank"]: rank["load"] for rank in json.loads(raw)["ranks"]}
    sent = loads["prefill/0/0"]["kv_bytes_sent"]
    assert 0 < sent == loads["decode/0/0"]["kv_bytes_received"]
    assert all(rank in table for rank in loads)


def test_a_prompt_beyond_the_context_is_the_callers_fault(smollm):
    with smollm.client() as client:
        context = client.models.list().data[0].max_model_len
        with pytest.raises(openai.BadRequestError, match=str(context)):
            client.completions.create(model=smollm.model, prompt=[5] * (context + 1))


def test_more_requests_than_the_queue_holds_are_told_when_to_come_back():
    words = ("cpu-unified", "--model", "tiny-moe", "cluster.runtime=local", "router.queue_limit=1")
    with serving(*words) as served, served.client() as client:
        asked = {"model": served.model, "prompt": "Once", "extra_body": {"ignore_eos": True}}
        with client.completions.create(**asked, max_tokens=3000, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(**asked, max_tokens=1)
            assert int(refused.value.response.headers["retry-after"]) >= 1
