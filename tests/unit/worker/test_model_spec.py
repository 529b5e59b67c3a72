"""config.json becomes a ModelSpec, or an error that names the file, the key and what works."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from core.errors import ModelError
from worker.architectures import read_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}


def write(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_llama(tmp_path):
    spec = read_spec(write(tmp_path, LLAMA | {"rope_theta": 5e5, "torch_dtype": "float16"}))
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.rope.kind, spec.rope.theta, spec.rope_dim) == ("default", 5e5, 16)
    assert (spec.context_len, spec.dtype, spec.tie_embeddings) == (512, "float16", False)
    assert (spec.mla, spec.moe, spec.eos_token_ids) == (None, None, (7,))
    assert spec.kv_numbers_per_token == 2 * 2 * 2 * 16


def test_a_deepseek(tmp_path):
    spec = read_spec(write(tmp_path, DEEPSEEK | {"moe_layer_freq": 2, "num_hidden_layers": 6}))
    assert spec.mla is not None
    assert spec.moe is not None
    assert (spec.mla.q_lora_rank, spec.mla.latent_dim, spec.head_dim) == (None, 20, 12)
    assert (spec.moe.method, spec.moe.norm_topk, spec.moe.scaling) == ("noaux_tc", True, 2.5)
    assert spec.rope_dim == 4
    assert spec.kv_numbers_per_token == 6 * 20
    assert [spec.is_moe_layer(i) for i in range(6)] == [False, False, True, False, True, False]


def test_a_deepseek_v2_scores_by_softmax(tmp_path):
    config = DEEPSEEK | {"architectures": ["DeepseekV2ForCausalLM"]}
    spec = read_spec(write(tmp_path, config))
    assert spec.moe is not None
    assert (spec.moe.method, spec.moe.norm_topk, spec.moe.scaling) == ("greedy", False, 1.0)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (7,)),
        ({"eos_token_id": [1, 2]}, (1, 2)),
        ({"eos_token_id": 3}, (3,)),
        ({"temperature": 1.0}, (7,)),
    ],
)
def test_generation_config_decides_where_text_ends(tmp_path, generation, expected):
    assert read_spec(write(tmp_path, LLAMA, generation)).eos_token_ids == expected


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_both_spellings_of_rope(tmp_path, spelling, kind_key):
    rope = {
        kind_key: "yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "rope_theta": 77.0,
    }
    spec = read_spec(write(tmp_path, DEEPSEEK | {spelling: rope})).rope
    assert (spec.kind, spec.factor, spec.original_context) == ("yarn", 40.0, 64)
    assert (spec.theta, spec.mscale, spec.mscale_all_dim) == (77.0, 0.7, 0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures.*GPT2LMHeadModel.*LlamaForCausalLM, .*Qwen3MoeForCausalLM, Deepseek",
        ),
        ({"architectures": None}, "architectures is missing"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config.quant_method is 'fp8'.*no quant",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size.*int"),
        ({"vocab_size": 0}, "vocab_size is 0.*at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*silu"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3.*divisor"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'.*bfloat16"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.type is 'dynamic'.*llama3, yarn"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "yarn", "truncate": False}}, "truncate is False.*true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*1.0"),
        ({"head_dim": 15}, "head_dim is 15.*even"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, words):
    with pytest.raises(ModelError, match=words) as error:
        read_spec(write(tmp_path, LLAMA | change))
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5.*even"),
        ({"topk_method": "random"}, "topk_method is 'random'.*noaux_tc"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'.*sigmoid with"),
        ({"n_group": 3}, "n_group is 3.*divisor"),
        ({"topk_group": 5}, "topk_group is 5.*at most n_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5.*at most 4"),
    ],
)
def test_what_a_deepseek_cannot_have_is_named(tmp_path, change, words):
    with pytest.raises(ModelError, match=words):
        read_spec(write(tmp_path, DEEPSEEK | change))


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / "config.json")) + ".*needs"):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(tmp_path, text, name):
    write(tmp_path, LLAMA)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=f"{name} is not a JSON object"):
        read_spec(tmp_path)


def test_reading_a_spec_does_not_import_torch():
    code = "import sys, worker.architectures, worker.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
