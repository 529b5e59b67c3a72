"""A model of DeepSeek-V3's architecture for the comparison: about 370M random parameters.

Its latent attention has the real head, 512 + 64, the only one that vLLM's CPU backend knows; the
tokenizer is SmolLM2's, whose single-token words the load generator sends.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

NAME = "mla370"
BLOCK_SIZE = 16  # tokens in a page of vLLM's: with its own choice this model does not start
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
CONFIG: dict[str, Any] = {  # opaque: a config.json
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 49_152,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 448,
    "n_routed_experts": 40,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}


def make(folder: Path, tokenizer: Path, seed: int = 0) -> Path:
    """The model in ``folder``, made there where it is not; ``tokenizer`` is a model folder."""
    if folder.exists():
        return folder
    from worker.models.random_weights import write_random_weights  # torch: takes seconds

    part = folder.with_name(f"{folder.name}.part")  # what was begun and not finished
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in COPIED:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, part / name)
    (part / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", "utf-8")
    write_random_weights(part, seed)
    return part.rename(folder)
