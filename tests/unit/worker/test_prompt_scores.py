"""Log-probabilities of prompt tokens against transformers, in chunks and beside a warm cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.support.real_engine import generate, unified_engine

FOLDER = Path(__file__).parents[3] / "models" / "tiny-moe"
PROMPT = [1, 44, 300, 17, 9, 256, 1023, 77, 5, 812, 64, 33, 21, 700, 8, 15, 99, 1200, 3, 47]


def reference() -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("chunk", [3, 64])
def test_prompt_logprobs_equal_transformers(chunk):
    engine = unified_engine(FOLDER, step_tokens=chunk)
    generate(engine, [PROMPT], 2)  # fills the cache, which must not hide the prompt's logits
    (chunks,) = generate(engine, [PROMPT], 2, prompt_logprobs=2, ignore_eos=True)
    scores = chunks[0].prompt_logprobs
    wanted = reference()
    assert len(scores) == len(PROMPT) - 1
    assert not any(chunk.prompt_logprobs for chunk in chunks[1:])
    for i, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(wanted[i, PROMPT[i + 1]]), abs=1e-3)
        values, ids = wanted[i].topk(2)
        assert [t.token_id for t in score.top] == ids.tolist()
        assert [t.logprob for t in score.top] == pytest.approx(values.tolist(), abs=1e-3)


def test_scoring_does_not_change_the_answer():
    engine = unified_engine(FOLDER, step_tokens=7)
    plain, scored = (
        generate(engine, [PROMPT, PROMPT[:9]], 8, ignore_eos=True, **options)
        for options in ({}, {"prompt_logprobs": 0})
    )
    for a, b in zip(plain, scored, strict=True):
        assert [c.token_ids for c in a] == [c.token_ids for c in b]
