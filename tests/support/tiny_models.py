"""Tiny random checkpoints made with transformers, and the trained one that ships with us."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 128
TINY_MOE = Path(__file__).parents[2] / "models" / "tiny-moe"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _configs() -> dict[str, PreTrainedConfig]:
    return _dense() | _qwen() | _deepseek()


def _dense() -> dict[str, PreTrainedConfig]:
    return {
        "llama": LlamaConfig(**_COMMON, num_key_value_heads=2),
        "llama-tied-llama3": LlamaConfig(
            **_COMMON,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=True,
            rope_parameters=_LLAMA3,
        ),
        "llama-biases": LlamaConfig(
            **_COMMON, num_key_value_heads=2, attention_bias=True, mlp_bias=True
        ),
        "mistral": MistralConfig(
            **_COMMON, num_key_value_heads=2, head_dim=20, sliding_window=None
        ),
    }


def _qwen() -> dict[str, PreTrainedConfig]:
    common = _COMMON | {"num_key_value_heads": 2}
    moe = common | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
    yarn = {name: _YARN[name] for name in _YARN if not name.startswith(("mscale", "beta"))}
    return {
        "qwen2": Qwen2Config(**common, tie_word_embeddings=True),
        "qwen2-yarn": Qwen2Config(**common, rope_parameters=yarn),
        "qwen3": Qwen3Config(**common, head_dim=16),
        "qwen3-biases": Qwen3Config(**common, head_dim=20, attention_bias=True),
        "qwen3-moe": Qwen3MoeConfig(**moe, head_dim=16, norm_topk_prob=True),
        "qwen3-moe-mixed": Qwen3MoeConfig(
            **(moe | {"num_hidden_layers": 5}),
            head_dim=16,
            norm_topk_prob=False,
            decoder_sparse_step=2,  # experts in layers 1 and 3 ..
            mlp_only_layers=[3],  # .. and so in layer 1 alone
        ),
    }


def _deepseek() -> dict[str, PreTrainedConfig]:
    v2 = _COMMON | _MLA | {"n_shared_experts": 2, "num_key_value_heads": 4}
    v3 = v2 | {"n_shared_experts": 1, "n_group": 4, "topk_group": 2}
    lite = _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    return {
        "v2-lite": DeepseekV2Config(
            **v2, q_lora_rank=None, topk_method="greedy", rope_parameters=lite
        ),
        "v2": DeepseekV2Config(
            **v2,
            q_lora_rank=20,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            rope_parameters=_YARN | {"mscale": 0.7},
        ),
        "v3": DeepseekV3Config(**v3, q_lora_rank=20, rope_parameters=_YARN),
        "v3-halves": DeepseekV3Config(
            **v3, q_lora_rank=None, rope_interleave=False, norm_topk_prob=False
        ),
    }


NAMES = tuple(_configs())


@dataclass(frozen=True)
class Checkpoint:
    """A model folder and transformers' own fp32 model of it: the reference."""

    folder: Path
    reference: PreTrainedModel

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocab]"""
        with torch.inference_mode():
            return self.reference(torch.tensor([ids]), use_cache=False).logits[0]


def make(name: str, folder: Path) -> Checkpoint:
    """Write the random checkpoint ``name`` (one of NAMES) into ``folder``."""
    torch.manual_seed(NAMES.index(name))
    model = AutoModelForCausalLM.from_config(_configs()[name], attn_implementation="eager")
    for key, parameter in model.state_dict().items():
        if key.endswith("e_score_correction_bias"):
            parameter.normal_(std=0.05)
        elif parameter.dim() >= 2:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        elif key.endswith("norm.weight"):
            parameter.normal_(mean=1.0, std=0.1)
        elif key.endswith(".bias"):
            parameter.normal_(std=0.2)
    model.eval().save_pretrained(folder)
    return Checkpoint(folder, model)


def trained() -> Checkpoint:
    """The trained mixture-of-experts model of models/tiny-moe."""
    model = AutoModelForCausalLM.from_pretrained(
        TINY_MOE, dtype=torch.float32, attn_implementation="eager"
    )
    return Checkpoint(TINY_MOE, model.eval())
