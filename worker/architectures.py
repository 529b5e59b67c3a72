"""ARCHITECTURES: one line for each that can be served; and config.json -> ModelSpec.

What is computed follows from the ModelSpec alone (worker/models/assemble.py). No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from worker.config_json import ConfigJson
from worker.model_spec import GATE_METHODS, ROPE_KINDS, MlaSpec, ModelSpec, MoeSpec, RopeSpec

DTYPES = ("bfloat16", "float16", "float32")
BIASES = ("attention_bias", "mlp_bias")
QUANTISATIONS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the name of an architecture says beyond the keys of its config.json."""

    mla: bool = False  # multi-head latent attention
    qkv_bias: bool = False
    qk_norm: bool = False
    biases: tuple[str, ...] = ()  # keys of BIASES that may be true
    moe: Callable[[ConfigJson], MoeSpec | None] | None = None


def read_spec(folder: Path) -> ModelSpec:
    """Read and check a model folder's config.json (and generation_config.json for the ends).

    Raises ModelError naming the file, the key and what is supported.
    """
    config = ConfigJson.read(folder / "config.json")
    name = _name(config)
    architecture = ARCHITECTURES[name]
    _refuse_unsupported(config, architecture)
    heads = config.count("num_attention_heads")
    hidden = config.count("hidden_size")
    mla = _mla(config) if architecture.mla else None
    if mla is not None:
        kv_heads, head_dim = heads, mla.nope_dim + mla.rope_dim
    else:
        kv_heads = config.count("num_key_value_heads", heads)
        head_dim = config.count("head_dim", hidden // heads)
        config.require(heads % kv_heads == 0, "num_key_value_heads", "a divisor of the heads")
        config.require(head_dim % 2 == 0, "head_dim", "an even number")
    rope = _rope(config)
    attention_bias = config.flag("attention_bias", default=False)
    return ModelSpec(
        architecture=name,
        layers=config.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        context_len=_context_len(config, rope),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        eos_token_ids=_eos_token_ids(folder, config),
        tie_embeddings=config.flag("tie_word_embeddings", default=False),
        dtype=_dtype(config),
        rope=rope,
        qkv_bias=architecture.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        qk_norm=architecture.qk_norm,
        mla=mla,
        moe=architecture.moe(config) if architecture.moe is not None else None,
    )


def _name(config: ConfigJson) -> str:
    names: list[str] = config.get("architectures", list[str])
    known = [name for name in names if name in ARCHITECTURES]
    config.require(len(known) == 1, "architectures", f"one of {', '.join(ARCHITECTURES)}")
    return known[0]


def _refuse_unsupported(config: ConfigJson, architecture: Architecture) -> None:
    for key in QUANTISATIONS:
        if key in config:
            config.section(key).require(
                False, "quant_method", f"no quantisation, weights in {' or '.join(DTYPES)}"
            )
    config.word("hidden_act", "silu", ("silu",))
    for key in BIASES:
        allowed = key in architecture.biases
        config.require(allowed or not config.flag(key, default=False), key, "false")
    _refuse_windows(config)


def _refuse_windows(config: ConfigJson) -> None:
    """Every token attends to all before it. Qwen has a switch; elsewhere a size is the switch."""
    switch = "use_sliding_window"
    if switch in config:
        config.require(not config.flag(switch, default=False), switch, "false")
    elif "sliding_window" in config:
        context = config.count("max_position_embeddings")
        wide = config.count("sliding_window") >= context
        config.require(wide, "sliding_window", f"null, or the whole context ({context})")
    kinds: list[str] = config.get("layer_types", list[str], [])
    config.require(set(kinds) <= {"full_attention"}, "layer_types", "full_attention alone")


def _dtype(config: ConfigJson) -> str:
    return config.word("dtype" if "dtype" in config else "torch_dtype", "bfloat16", DTYPES)


def _context_len(config: ConfigJson, rope: RopeSpec) -> int:
    """Tokens. Where YaRN was added to a config, the declared length may be that before it."""
    declared = config.count("max_position_embeddings")
    if rope.kind == "yarn":
        return max(declared, int(rope.factor * rope.original_context))
    return declared


def _eos_token_ids(folder: Path, config: ConfigJson) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = ConfigJson.read(path) if path.exists() else config
    source = generation if "eos_token_id" in generation else config
    value: int | list[int] = source.get("eos_token_id", int | list[int], [])
    return (value,) if isinstance(value, int) else tuple(value)


def _rope(config: ConfigJson) -> RopeSpec:
    """Both spellings: rope_theta with rope_scaling, and transformers 5's rope_parameters."""
    scaling = config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    partial = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    scaling.require(partial == 1.0, "partial_rotary_factor", "1.0")
    kind = scaling.word("rope_type" if "rope_type" in scaling else "type", "default", ROPE_KINDS)
    if kind == "default":
        return RopeSpec(theta=theta)
    scaling.require(scaling.flag("truncate", default=True), "truncate", "true")
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=scaling.number("factor"),
        original_context=scaling.count(
            "original_max_position_embeddings", config.count("max_position_embeddings")
        ),
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=scaling.number("mscale", 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
        attention_factor=scaling.number("attention_factor")
        if "attention_factor" in scaling
        else None,
    )


def _mla(config: ConfigJson) -> MlaSpec:
    rope_dim = config.count("qk_rope_head_dim")
    config.require(rope_dim % 2 == 0, "qk_rope_head_dim", "an even number")
    return MlaSpec(
        q_lora_rank=config.count("q_lora_rank") if "q_lora_rank" in config else None,
        kv_lora_rank=config.count("kv_lora_rank"),
        nope_dim=config.count("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=config.count("v_head_dim"),
        interleaved=config.flag("rope_interleave", default=True),
    )


def _qwen_moe(config: ConfigJson) -> MoeSpec:
    dense: list[int] = config.get("mlp_only_layers", list[int], [])
    step = config.count("decoder_sparse_step", 1)
    every = range(step - 1, config.count("num_hidden_layers"), step)
    experts = config.count("num_experts" if "num_experts" in config else "num_local_experts")
    topk = config.count("num_experts_per_tok")
    config.require(topk <= experts, "num_experts_per_tok", f"at most {experts}")
    return MoeSpec(
        experts=experts,
        topk=topk,
        intermediate=config.count("moe_intermediate_size"),
        shared_experts=0,
        method="greedy",
        groups=1,
        topk_groups=1,
        norm_topk=config.flag("norm_topk_prob", default=False),
        scaling=1.0,
        layers=frozenset(every).difference(dense),
    )


def _deepseek_v2_moe(config: ConfigJson) -> MoeSpec | None:
    return _deepseek_moe(config, "greedy", norm_topk=False, scaling=1.0)


def _deepseek_v3_moe(config: ConfigJson) -> MoeSpec | None:
    return _deepseek_moe(config, "noaux_tc", norm_topk=True, scaling=2.5)


def _deepseek_moe(
    config: ConfigJson, method: str, *, norm_topk: bool, scaling: float
) -> MoeSpec | None:
    """The last three are what the configuration means where it does not say."""
    if "n_routed_experts" not in config:
        return None
    method = config.word("topk_method", method, GATE_METHODS)
    scoring = config.word(
        "scoring_func", "sigmoid" if method == "noaux_tc" else "softmax", ("softmax", "sigmoid")
    )
    config.require(
        (scoring == "sigmoid") == (method == "noaux_tc"),
        "scoring_func",
        "sigmoid with topk_method noaux_tc, softmax with the others",
    )
    experts = config.count("n_routed_experts")
    groups = config.count("n_group", 1)
    config.require(experts % groups == 0, "n_group", "a divisor of n_routed_experts")
    topk_groups = config.count("topk_group", groups)
    config.require(topk_groups <= groups, "topk_group", "at most n_group")
    topk = config.count("num_experts_per_tok")
    room = experts if method == "greedy" else experts // groups * topk_groups
    config.require(topk <= room, "num_experts_per_tok", f"at most {room}")
    first: int = config.get("first_k_dense_replace", int, 0)
    every = range(0, config.count("num_hidden_layers"), config.count("moe_layer_freq", 1))
    return MoeSpec(
        experts=experts,
        topk=topk,
        intermediate=config.count("moe_intermediate_size"),
        shared_experts=config.get("n_shared_experts", int, 0),
        method=method,
        groups=groups,
        topk_groups=topk_groups,
        norm_topk=config.flag("norm_topk_prob", default=norm_topk),
        scaling=config.number("routed_scaling_factor", scaling),
        layers=frozenset(layer for layer in every if layer >= first),
    )


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(biases=BIASES),
    "MistralForCausalLM": Architecture(),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True, biases=("attention_bias",)),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, biases=("attention_bias",), moe=_qwen_moe),
    "DeepseekV2ForCausalLM": Architecture(mla=True, moe=_deepseek_v2_moe),
    "DeepseekV3ForCausalLM": Architecture(mla=True, moe=_deepseek_v3_moe),
}
