"""A real model answers the same with overlap: late tokens, penalties, stops, prompt scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.real_engine import generate, tokens, unified_engine

FOLDER = Path(__file__).parents[3] / "models" / "tiny-moe"
PROMPT = [1, 44, 300, 17, 9, 256, 1023, 77, 5, 812, 64, 33, 21, 700, 8, 15, 99, 1200, 3, 47]
PROMPTS = [PROMPT, PROMPT[:9], PROMPT[:9], [7, 5]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"prompt_logprobs": 1, "logprobs": True},
    ],
)
def test_answers_do_not_depend_on_overlap(options: dict[str, Any]):
    off, on = (
        generate(unified_engine(FOLDER, step_tokens=7, overlap=overlap), PROMPTS, 10, **options)
        for overlap in (False, True)
    )
    assert [tokens(chunks) for chunks in on] == [tokens(chunks) for chunks in off]
    for a, b in zip(on, off, strict=True):
        assert len(a[0].prompt_logprobs) == len(b[0].prompt_logprobs)
        assert a[-1].finish is b[-1].finish


def test_a_stop_token_ends_the_same_answer():
    (whole,) = generate(unified_engine(FOLDER), [PROMPT], 10, ignore_eos=True)
    stop = tokens(whole)[4]
    options = {"ignore_eos": True, "stop_token_ids": (stop,)}
    engine = unified_engine(FOLDER, overlap=True)
    (chunks,) = generate(engine, [PROMPT], 10, **options)
    ids = tokens(whole)
    assert tokens(chunks) == ids[: ids.index(stop) + 1]
    assert engine.scheduler.cache.account().owned == 0
