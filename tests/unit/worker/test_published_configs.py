"""Published models are read as what they are known to be."""

from __future__ import annotations

import json
import math

import pytest

from core.errors import ModelError
from tests.support.published_configs import PUBLISHED, unquantised
from worker.architectures import ARCHITECTURES, read_spec
from worker.model_spec import ModelSpec


@pytest.fixture
def published(tmp_path):
    def read(name: str, **changes) -> ModelSpec:
        (tmp_path / "config.json").write_text(json.dumps(unquantised(name) | changes))
        return read_spec(tmp_path)

    return read


def parameters(spec: ModelSpec) -> float:
    """Billions of parameters, counted layer by layer from the facts read."""
    if spec.mla is not None:
        mla, queries = spec.mla, spec.heads * spec.head_dim
        rank = mla.q_lora_rank
        attention = spec.hidden * queries if rank is None else (spec.hidden + queries) * rank
        attention += spec.hidden * mla.latent_dim + spec.hidden * spec.heads * mla.v_dim
        attention += mla.kv_lora_rank * spec.heads * (mla.nope_dim + mla.v_dim)
    else:
        attention = 2 * spec.hidden * (spec.heads + spec.kv_heads) * spec.head_dim
    total = spec.layers * attention + spec.vocab * spec.hidden * (1 if spec.tie_embeddings else 2)
    for layer in range(spec.layers):
        if spec.moe is not None and spec.is_moe_layer(layer):
            experts = spec.moe.experts + spec.moe.shared_experts
            total += spec.hidden * (3 * experts * spec.moe.intermediate + spec.moe.experts)
        else:
            total += 3 * spec.hidden * spec.intermediate
    return total / 1e9


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes", "context_len"),
    [
        ("DeepSeek-R1", 671.0, 70_272, 163_840),
        ("DeepSeek-V2-Lite", 15.7, 31_104, 163_840),
        ("Llama-3.1-8B-Instruct", 8.03, 131_072, 131_072),
        ("Llama-3.2-1B-Instruct", 1.24, 32_768, 131_072),
        ("Mistral-7B-Instruct-v0.3", 7.25, 131_072, 32_768),
        ("Qwen2.5-7B-Instruct", 7.62, 57_344, 32_768),
        ("Qwen3-8B", 8.19, 147_456, 40_960),
        ("Qwen3-30B-A3B", 30.5, 98_304, 40_960),
    ],
)
def test_size_cache_and_context(published, name, billions, kv_bytes, context_len):
    spec = published(name)
    assert parameters(spec) == pytest.approx(billions, rel=5e-3)
    assert spec.kv_numbers_per_token * 2 == kv_bytes
    assert (spec.context_len, spec.dtype) == (context_len, "bfloat16")


def test_every_architecture_has_a_published_model():
    assert {c["architectures"][0] for c in PUBLISHED.values()} == set(ARCHITECTURES)


def test_r1(published):
    spec = published("DeepSeek-R1")
    assert spec.mla is not None
    assert spec.moe is not None
    assert (spec.mla.q_lora_rank, spec.mla.latent_dim, spec.mla.interleaved) == (1536, 576, True)
    moe = spec.moe
    assert (moe.method, moe.groups, moe.topk_groups, moe.topk) == ("noaux_tc", 8, 4, 8)
    assert (moe.norm_topk, moe.scaling, moe.layers) == (True, 2.5, frozenset(range(3, 61)))
    assert (spec.rope.kind, spec.rope.factor, spec.rope.mscale_all_dim) == ("yarn", 40.0, 1.0)
    assert spec.eos_token_ids == (1,)


def test_r1_as_it_is_published_is_quantised(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["DeepSeek-R1"]))
    words = r"quantization_config\.quant_method is 'fp8'; supported: no quantisation.*bfloat16"
    with pytest.raises(ModelError, match=words):
        read_spec(tmp_path)


def test_v2_lite(published):
    spec = published("DeepSeek-V2-Lite")
    assert spec.mla is not None
    assert spec.moe is not None
    assert (spec.mla.q_lora_rank, spec.head_dim) == (None, 192)
    assert (spec.moe.method, spec.moe.norm_topk, spec.moe.scaling) == ("greedy", False, 1.0)
    assert (spec.moe.shared_experts, spec.moe.layers) == (2, frozenset(range(1, 27)))
    assert (spec.rope.mscale, spec.rope.mscale_all_dim) == (0.707, 0.707)


def test_llama_3(published):
    large, small = published("Llama-3.1-8B-Instruct"), published("Llama-3.2-1B-Instruct")
    assert (large.rope.kind, large.rope.factor, large.rope.original_context) == ("llama3", 8, 8192)
    assert (large.tie_embeddings, large.head_dim, large.qkv_bias) == (False, 128, False)
    assert (small.rope.factor, small.tie_embeddings, small.head_dim) == (32.0, True, 64)
    assert small.eos_token_ids == (128001, 128008, 128009)


def test_qwen(published):
    two, three = published("Qwen2.5-7B-Instruct"), published("Qwen3-8B")
    assert (two.qkv_bias, two.out_bias, two.qk_norm) == (True, False, False)
    assert (three.qkv_bias, three.out_bias, three.qk_norm) == (False, False, True)
    moe = published("Qwen3-30B-A3B").moe
    assert moe is not None
    assert (moe.method, moe.experts, moe.topk, moe.intermediate) == ("greedy", 128, 8, 768)
    assert (moe.norm_topk, moe.shared_experts, len(moe.layers)) == (True, 0, 48)


def test_yarn_that_was_added_stretches_the_context(published):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = published("Qwen2.5-7B-Instruct", rope_scaling=yarn)
    assert (spec.context_len, spec.rope.attention_factor) == (131_072, None)
    assert math.isclose(spec.rope.factor, 4.0)


def test_where_qwen_has_experts(published):
    changes = {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    moe = published("Qwen3-30B-A3B", **changes).moe
    assert moe is not None
    assert moe.layers == {1, 5, 7}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("Mistral-7B-Instruct-v0.3", {"sliding_window": 4096}, "sliding_window is 4096.*32768"),
        ("Qwen3-8B", {"use_sliding_window": True}, "use_sliding_window is True.*false"),
        ("Qwen3-8B", {"layer_types": ["sliding_attention"]}, "layer_types.*full_attention alone"),
        ("Qwen3-30B-A3B", {"num_experts": 4}, "num_experts_per_tok is 8.*at most 4"),
        ("Mistral-7B-Instruct-v0.3", {"attention_bias": True}, "attention_bias is True.*false"),
        ("Qwen3-8B", {"mlp_bias": True}, "mlp_bias is True.*false"),
        ("DeepSeek-R1", {"attention_bias": True}, "attention_bias is True.*false"),
        ("Qwen3-8B", {"compression_config": {"quant_method": "x"}}, "compression_config.*'x'"),
    ],
)
def test_what_is_not_computed_is_refused(published, name, change, words):
    with pytest.raises(ModelError, match=words):
        published(name, **change)


def test_a_window_as_wide_as_the_context_is_none(published):
    assert published("Mistral-7B-Instruct-v0.3", sliding_window=32768).context_len == 32768
