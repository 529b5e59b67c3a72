"""A GGUF file becomes the checkpoint it was made from."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cluster import gguf_import
from core.errors import ModelError
from tests.support import gguf_files


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported")
    weights = gguf_files.write_gguf(folder / "tiny.gguf")
    gguf_import.convert(folder / "tiny.gguf", folder)
    return folder, weights


def test_every_weight_comes_back_in_bf16(imported):
    folder, weights = imported
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(weights)
    for name, values in weights.items():
        assert torch.equal(found[name], torch.from_numpy(values).bfloat16()), name


def test_the_config_is_that_of_a_llama(imported):
    config = json.loads((imported[0] / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    assert (config["head_dim"], config["num_key_value_heads"]) == (8, 2)
    ends = json.loads((imported[0] / "generation_config.json").read_text("utf-8"))
    assert ends["eos_token_id"] == 2


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(imported):
    tokenizer = Tokenizer.from_file(str(imported[0] / "tokenizer.json"))
    assert tokenizer.encode("ab12<|im_end|>").tokens == ["ab", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode(" é\n 12").ids) == " é\n 12"


def test_the_chat_template_travels_along(imported):
    config = json.loads((imported[0] / "tokenizer_config.json").read_text("utf-8"))
    assert config["chat_template"] == "{{ messages }}"
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_another_architecture_is_refused(tmp_path):
    """The facts of an architecture carry its name, so nothing of a stranger would be found."""
    gguf_files.write_gguf(tmp_path / "x.gguf", architecture="gemma")
    with pytest.raises(ModelError, match="llama family"):
        gguf_import.convert(tmp_path / "x.gguf", tmp_path)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_rounding_to_bf16_agrees_with_torch(values):
    array = np.array(values, np.float32)
    bits = torch.from_numpy(array).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(gguf_import.bfloat16_bits(array), bits)
