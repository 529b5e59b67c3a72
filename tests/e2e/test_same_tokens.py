"""One worker or two, the KV crossing over Mooncake: the same request gives the same tokens."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.served import serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

LOCAL = ("cluster.runtime=local", "model.dtype=float32")
SHARED = [300 + 11 * i % 1700 for i in range(200)]
PROMPTS = [
    [5],
    [17, 400, 91, 2000, 8],
    [40 + i for i in range(64)],  # exactly one chunk
    [900 + 3 * i % 800 for i in range(150)],  # three chunks
    SHARED,
    [*SHARED, 60, 61, 62],
    [*SHARED, 70],
    SHARED[:100],
]


async def answers(served, **sampling):
    """For each prompt, all at once: text, tokens and their log-probabilities."""

    async def ask(client, prompt):
        answer = await client.completions.create(
            model=served.model,
            prompt=prompt,
            max_tokens=24,
            logprobs=1,
            extra_body={"ignore_eos": True},
            **sampling,
        )
        return answer.choices[0]

    async with served.async_client() as client:
        return await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))


@pytest.mark.parametrize("model", ["tiny-moe", "smollm2-135m"])
def test_disaggregated_serving_gives_the_tokens_of_unified_serving(model):
    chunks = [f"{group}.step_tokens=64" for group in ("prefill", "decode")]
    with (
        serving("cpu-unified", "--model", model, *LOCAL, "unified.step_tokens=64") as unified,
        serving("cpu", "--model", model, *LOCAL, *chunks) as pair,
    ):
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 11}):
            one = asyncio.run(answers(unified, **sampling))
            two = asyncio.run(answers(pair, **sampling))
            assert [a.text for a in two] == [a.text for a in one]
            for a, b in zip(one, two, strict=True):
                assert b.logprobs.tokens == a.logprobs.tokens
                assert b.logprobs.token_logprobs == pytest.approx(
                    a.logprobs.token_logprobs, abs=1e-3
                )
        assert pair.rank("decode")["load"]["kv_bytes_received"] > 0
        assert unified.at_rest()
        assert pair.at_rest()
