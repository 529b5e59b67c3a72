"""Tiny models: of every architecture, readable by transformers too, with a tokenizer that works."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster import model_store, tiny_model
from core.clock import VirtualClock
from core.errors import ModelError
from router.text.chat import open_template
from router.text.request import ChatPrompt
from router.text.tokenizer import decode, open_hf
from tests.support.steps import Row, advance, scattered
from worker.architectures import ARCHITECTURES, read_spec
from worker.cache.kv_pool import KVPool
from worker.models.weights import load_model


@pytest.mark.parametrize("model_type", tiny_model.TEMPLATES)
def test_transformers_computes_the_same(tmp_path, model_type):
    tiny_model.make(tmp_path, model_type)
    model_store.check_folder(tmp_path)
    spec = read_spec(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids = list(b"A text of some bytes.")
    with torch.inference_mode():
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    model = load_model(tmp_path, spec, torch.float32)
    pool = KVPool(spec, len(ids), torch.float32)
    [logits] = advance(model, pool, [(Row(ids, scattered(len(ids))), len(ids))])
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4)
    assert 0.3 < logits.std() < 3  # neither flat nor settled on one token
    assert len(set(logits.argmax(-1).tolist())) > 3


def test_every_architecture_has_a_template():
    assert {name for name, _ in tiny_model.TEMPLATES.values()} == set(ARCHITECTURES)


def test_the_same_seed_gives_the_same_weights(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tiny_model.make(tmp_path / name, "llama", seed)
    a, b, c = (data.read_bytes() for data in sorted(tmp_path.glob("*/model.safetensors")))
    assert a == b != c


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    tiny_model.make(folder, "llama")
    return folder


@pytest.mark.parametrize("text", ["plain", " spaces  and\nlines\t", "héllo 日本 🙂", "\x00\x7f"])
def test_any_text_survives_the_tokenizer(llama, text):
    tokenizer = open_hf(llama)
    ids = tokenizer.encode(text, add_special=True)
    assert ids == list(text.encode())
    assert decode(tokenizer, ids) == text


def test_a_chat_ends_with_the_turn_of_the_assistant(llama):
    tokenizer = open_hf(llama)
    template = open_template(llama, VirtualClock())
    assert template is not None
    text = template.render(ChatPrompt(messages=({"role": "user", "content": "hi"},)))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special=False)
    assert ids[:5] == [257, *b"user"]
    assert ids.count(tokenizer.eos_id) == 1
    assert set(read_spec(llama).eos_token_ids) == {256, 258}
    assert tokenizer.vocab_size == json.loads((llama / "config.json").read_text())["vocab_size"]


def test_nothing_is_overwritten(llama, tmp_path):
    with pytest.raises(ModelError, match="not an empty folder"):
        tiny_model.make(llama, "llama")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="not an empty folder"):
        tiny_model.make(tmp_path / "file", "llama")


def test_an_unknown_architecture_lists_those_there_are(tmp_path):
    with pytest.raises(ModelError, match=r"'gpt2': choose one of llama, .*deepseek_v3"):
        tiny_model.make(tmp_path / "new", "gpt2")
    assert not (tmp_path / "new").exists()
