"""Make a tiny model folder with random weights: any architecture, any text, no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.errors import ModelError
from router.text.token_bytes import byte_characters
from worker.architectures import read_spec

Json = dict[str, Any]  # opaque: what a config.json holds

# after the 256 bytes, whose ids are their values
SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_COMMON: Json = {
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": SPECIAL[END_OF_TEXT],
    "eos_token_id": SPECIAL[END_OF_TURN],
    "dtype": "bfloat16",
}
_EXPERTS: Json = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED: Json = {"num_key_value_heads": 2, "head_dim": 16}
_LATENT: Json = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# model_type of a config.json -> (architecture, what it has beyond _COMMON)
TEMPLATES: dict[str, tuple[str, Json]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        _GROUPED | _EXPERTS | {"num_experts": 8, "norm_topk_prob": True},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _EXPERTS | _LATENT),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        _EXPERTS | _LATENT | {"q_lora_rank": 48, "n_group": 4, "topk_group": 2},
    ),
}
DEFAULT = "deepseek_v3"


def make(folder: Path, model_type: str = DEFAULT, seed: int = 0) -> None:
    """Write config, tokenizer (a token is a byte), chat template and random weights.

    Raises ModelError for a folder that is not empty and for an unknown ``model_type``.
    """
    if model_type not in TEMPLATES:
        raise ModelError(
            f"no tiny model of architecture {model_type!r}: choose one of {', '.join(TEMPLATES)}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there already and not an empty folder: name another")
    from worker.models.random_weights import write_random_weights  # torch: takes seconds

    folder.mkdir(parents=True, exist_ok=True)
    architecture, own = TEMPLATES[model_type]
    config = {"architectures": [architecture], "model_type": model_type, **_COMMON, **own}
    _write_json(folder / "config.json", config)
    ends = [SPECIAL[END_OF_TEXT], SPECIAL[END_OF_TURN]]
    _write_json(folder / "generation_config.json", {"eos_token_id": ends})
    _write_tokenizer(folder, read_spec(folder).context_len)
    write_random_weights(folder, seed)


def _write_tokenizer(folder: Path, context_len: int) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {"id": i, "content": token, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for token, i in SPECIAL.items()
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level | {"use_regex": False},
        "decoder": byte_level | {"use_regex": False},
        "model": {"type": "BPE", "vocab": byte_characters() | SPECIAL, "merges": []},
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TURN,
            "model_max_length": context_len,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
