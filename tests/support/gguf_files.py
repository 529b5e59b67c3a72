"""A very small GGUF file of the Llama family, and the weights that an import must give back."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, KV_HEADS, LAYERS, INTERMEDIATE = 32, 4, 2, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "12", "ab"]


def write_gguf(path: Path, *, architecture: str = "llama") -> dict[str, np.ndarray]:
    """Write random fp32 weights; return them under the names of a Llama checkpoint."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    weights = _weights()
    for ours, theirs, heads in _names():
        values = weights[ours]
        if heads:  # GGUF interleaves the two rotary halves of each head
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, HIDDEN)
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _names() -> list[tuple[str, str, int]]:
    """(checkpoint name, GGUF name, heads whose rows are reordered or 0)."""
    names = [
        ("model.embed_tokens.weight", "token_embd.weight", 0),
        ("model.norm.weight", "output_norm.weight", 0),
    ]
    for i in range(LAYERS):
        ours, theirs = f"model.layers.{i}.", f"blk.{i}."
        names += [
            (f"{ours}input_layernorm.weight", f"{theirs}attn_norm.weight", 0),
            (f"{ours}self_attn.q_proj.weight", f"{theirs}attn_q.weight", HEADS),
            (f"{ours}self_attn.k_proj.weight", f"{theirs}attn_k.weight", KV_HEADS),
            (f"{ours}self_attn.v_proj.weight", f"{theirs}attn_v.weight", 0),
            (f"{ours}self_attn.o_proj.weight", f"{theirs}attn_output.weight", 0),
            (f"{ours}post_attention_layernorm.weight", f"{theirs}ffn_norm.weight", 0),
            (f"{ours}mlp.gate_proj.weight", f"{theirs}ffn_gate.weight", 0),
            (f"{ours}mlp.up_proj.weight", f"{theirs}ffn_up.weight", 0),
            (f"{ours}mlp.down_proj.weight", f"{theirs}ffn_down.weight", 0),
        ]
    return names


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    head_dim = HIDDEN // HEADS
    rows = {
        "q_proj": (HIDDEN, HIDDEN),
        "k_proj": (KV_HEADS * head_dim, HIDDEN),
        "v_proj": (KV_HEADS * head_dim, HIDDEN),
        "o_proj": (HIDDEN, HIDDEN),
        "gate_proj": (INTERMEDIATE, HIDDEN),
        "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE),
        "embed_tokens": (len(TOKENS), HIDDEN),
    }
    return {
        ours: rng.standard_normal(rows.get(ours.split(".")[-2], (HIDDEN,))).astype(np.float32)
        for ours, _, _ in _names()
    }
