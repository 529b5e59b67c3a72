"""The default model's greedy answers against transformers, fp32, 20 prompts.

A differing token counts as equal only where the reference's own two best logits are closer than
1e-4; how often that was needed is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

from core.clock import RealClock
from router.text.chat import open_template
from router.text.request import ChatPrompt
from router.text.tokenizer import open_hf
from tests.support.models import smollm2_folder
from tests.support.real_engine import generate, tokens, unified_engine

NEW = 24
TIE = 1e-4
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain gravity to a child.",
    "List three primary colors.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "What is 12 plus 30?",
    "Describe a sunset in one sentence.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
)
TEXTS = (
    "Once upon a time",
    "The three laws of motion are",
    "def fibonacci(n):",
    "In 1969, humans first",
    "The quick brown fox",
    "Water boils at",
    "My favourite book is",
    "To make a cup of tea,",
    "The history of Rome began",
    "A prime number is",
)


def prompts(folder: Path) -> list[list[int]]:
    tokenizer, template = open_hf(folder), open_template(folder, RealClock())
    assert template is not None
    chats = [ChatPrompt(messages=({"role": "user", "content": q},)) for q in QUESTIONS]
    return [tokenizer.encode(template.render(c), add_special=False) for c in chats] + [
        tokenizer.encode(t, add_special=True) for t in TEXTS
    ]


def reference(model, ids: list[int], new: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and, for each, the gap between the two best logits."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    best = [score[0].topk(2).values.tolist() for score in out.scores]
    return out.sequences[0, len(ids) :].tolist(), [a - b for a, b in best]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_greedy_answers_equal_transformers(capsys):
    folder = smollm2_folder()
    asked = prompts(folder)
    engine = unified_engine(folder, step_tokens=64)
    ours = generate(engine, asked, NEW, ignore_eos=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ties = 0
    for ids, chunks in zip(asked, ours, strict=True):
        wanted, gaps = reference(model, ids, NEW)
        got = tokens(chunks)
        assert len(got) == NEW
        differ = next((i for i in range(NEW) if got[i] != wanted[i]), None)
        if differ is not None:
            assert gaps[differ] < TIE, f"token {differ}: {got[differ]} is not {wanted[differ]}"
            ties += 1
    with capsys.disabled():
        sys.stdout.write(f" [{len(asked)} prompts, {ties} differ at a tie closer than {TIE}]")
