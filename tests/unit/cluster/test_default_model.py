"""The default model as converted: transformers, an independent reader, gets sense out of it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.models import smollm2_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder():
    return smollm2_folder()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_it_knows_the_capital_of_france(folder, tokenizer):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_numbers_are_single_digits(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2026").input_ids) == [
        "in", "Ġ", "2", "0", "2", "6",
    ]  # fmt: skip


def test_what_the_model_is(folder):
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
    assert (config["rms_norm_eps"], config["eos_token_id"]) == (1e-5, 2)
    assert config["max_position_embeddings"] == 8192
