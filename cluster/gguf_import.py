"""Turn a GGUF file of the Llama family into a model folder: config, tokenizer, bf16 safetensors.

Quantised tensors are dequantised, so the result is what the GGUF computes, not the original
weights. Works one tensor at a time, on numpy alone: no torch, no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import ModelError

Array = npt.NDArray[np.float32]

_CONTROL = 3  # tokenizer.ggml.token_type of special tokens
_DIGITS_APART = frozenset({"smollm"})  # pre-tokenizers that split numbers into single digits

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model in ``gguf_file`` into the existing ``folder``.

    Raises ModelError for another architecture, a tensor without a name here, or values that
    are not finite. ``folder`` is then incomplete: convert into a place of its own and rename.
    """
    import gguf  # takes 0.3 s; only a conversion needs it

    reader = gguf.GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts["general.architecture"] != "llama":
        raise ModelError(f"{gguf_file.name}: only GGUF files of the llama family can be imported")
    config = _config(facts, tied=all(t.name != "output.weight" for t in reader.tensors))
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(facts, folder)
    shapes = {_name(t.name): tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    tensors = (
        _tensor(_name(t.name), gguf.quants.dequantize(t.data, t.tensor_type), config)
        for t in reader.tensors
    )
    _write_safetensors(folder / "model.safetensors", shapes, tensors)


def _config(facts: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The config.json of a LlamaForCausalLM."""
    hidden = int(facts["llama.embedding_length"])
    heads = int(facts["llama.attention.head_count"])
    eps = float(facts["llama.attention.layer_norm_rms_epsilon"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "num_hidden_layers": int(facts["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(facts.get("llama.attention.head_count_kv", heads)),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(facts["llama.context_length"]),
        "rms_norm_eps": float(f"{eps:.6g}"),  # GGUF keeps it in fp32: 9.99999975e-06 is 1e-05
        "rope_theta": float(facts.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": int(facts["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(facts["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(
            facts.get("tokenizer.ggml.padding_token_id", facts["tokenizer.ggml.eos_token_id"])
        ),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


# --- tokenizer ----------------------------------------------------------------------------------


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a byte-level BPE.

    GGUF names the pre-tokenizer instead of describing it; importers that ignore the name lose
    the step that splits digits, and numbers then become other tokens than in training.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if facts["tokenizer.ggml.model"] != "gpt2":
        raise ModelError("only GGUF files with a byte-level BPE tokenizer can be imported")
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if facts["tokenizer.ggml.pre"] in _DIGITS_APART:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = facts["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = facts["tokenizer.ggml.eos_token_id"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[eos],
        "pad_token": tokens[facts.get("tokenizer.ggml.padding_token_id", eos)],
        "add_bos_token": bool(facts.get("tokenizer.ggml.add_bos_token", False)),
        "model_max_length": int(facts["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
    }
    if template := facts.get("tokenizer.chat_template"):
        config["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", config)


# --- weights ------------------------------------------------------------------------------------


def _name(gguf_name: str) -> str:
    """The name a tensor has in a LlamaForCausalLM checkpoint."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    block, _, rest = gguf_name.removeprefix("blk.").partition(".")
    part = rest.removesuffix(".weight")
    if not block.isdigit() or part not in _BLOCK_NAMES:
        raise ModelError(f"no place for the GGUF tensor {gguf_name!r} in a Llama model")
    return f"model.layers.{block}.{_BLOCK_NAMES[part]}.weight"


def _tensor(name: str, values: Array, config: dict[str, Any]) -> tuple[str, Array]:
    """A dequantised tensor in the order Llama checkpoints keep it."""
    if not np.isfinite(values).all():
        raise ModelError(f"the GGUF tensor for {name} holds values that are not finite")
    if name.endswith("q_proj.weight"):
        values = _halves_apart(values, config["num_attention_heads"])
    elif name.endswith("k_proj.weight"):
        values = _halves_apart(values, config["num_key_value_heads"])
    return name, values


def _halves_apart(weight: Array, heads: int) -> Array:
    """Undo GGUF's row order: it interleaves the two rotary halves of each head."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def bfloat16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """The upper half of each fp32, rounded to nearest even. ``values`` are finite."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    upper: npt.NDArray[np.uint16] = (rounded >> np.uint32(16)).astype(np.uint16)
    return upper


def _write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], tensors: Iterator[tuple[str, Array]]
) -> None:
    """Header (length, JSON), then each tensor as bf16, in the order of ``shapes``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format keeps the data aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), (produced, values) in zip(shapes.items(), tensors, strict=True):
            assert (produced, values.shape) == (name, shape), (produced, values.shape, name, shape)
            file.write(bfloat16_bits(values).tobytes())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
