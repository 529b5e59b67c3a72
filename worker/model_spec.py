"""ModelSpec: the facts of a model folder's config.json that we use, validated. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from core.errors import ModelError

T = TypeVar("T")

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
}
ROPE_KINDS = ("default", "llama3", "yarn")
GATE_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding; the scaling fields mean something for their ``kind`` only."""

    theta: float
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0  # by how much the context was stretched
    original_context: int = 0  # tokens, before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn; 0: not given
    mscale_all_dim: float = 0.0  # yarn; 0: not given
    attention_factor: float | None = None  # yarn: overrides what mscale implies


class MlaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention. A token's cache is ``latent_dim`` numbers a layer."""

    q_lora_rank: int | None  # None: queries are projected directly (V2-Lite)
    kv_lora_rank: int
    nope_dim: int  # of a query or key head, without position
    rope_dim: int  # of a query head; one rotary key is shared by all heads
    v_dim: int
    interleaved: bool  # rotary pairs are neighbours in the checkpoint

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.rope_dim


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts."""

    experts: int
    topk: int
    intermediate: int  # of one expert
    shared_experts: int  # seen by every token, as one MLP of their summed width
    method: str  # one of GATE_METHODS; noaux_tc scores by sigmoid, the others by softmax
    groups: int
    topk_groups: int
    norm_topk: bool
    scaling: float
    first_dense: int  # layers before the first MoE layer
    layer_freq: int


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is. ``head_dim`` of an MLA model is a whole query head's."""

    family: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of a dense MLP
    vocab: int
    context_len: int  # tokens
    norm_eps: float
    eos_token_ids: tuple[int, ...]
    tie_embeddings: bool
    dtype: str  # of the weights on disk: "bfloat16", "float16" or "float32"
    rope: RopeSpec
    mla: MlaSpec | None = None
    moe: MoeSpec | None = None

    @property
    def kv_numbers_per_token(self) -> int:
        """How many numbers one token keeps in the KV cache, over all layers."""
        if self.mla is not None:
            return self.layers * self.mla.latent_dim
        return self.layers * 2 * self.kv_heads * self.head_dim

    @property
    def rope_dim(self) -> int:
        """How many numbers of a head are rotated."""
        return self.mla.rope_dim if self.mla is not None else self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        moe = self.moe
        return moe is not None and layer >= moe.first_dense and layer % moe.layer_freq == 0


def read_spec(folder: Path) -> ModelSpec:
    """Read and check a model folder's config.json (and generation_config.json for the ends).

    Raises ModelError naming the file, the key and what is supported.
    """
    config = _Config.read(folder / "config.json")
    architecture = _architecture(config)
    _refuse_unsupported(config)
    family = FAMILIES[architecture]
    heads = config.count("num_attention_heads")
    hidden = config.count("hidden_size")
    mla = _mla(config) if family == "deepseek" else None
    if mla is not None:
        kv_heads, head_dim = heads, mla.nope_dim + mla.rope_dim
    else:
        kv_heads = config.count("num_key_value_heads", heads)
        head_dim = config.count("head_dim", hidden // heads)
        config.require(heads % kv_heads == 0, "num_key_value_heads", "a divisor of the heads")
        config.require(head_dim % 2 == 0, "head_dim", "an even number")
    return ModelSpec(
        family=family,
        architecture=architecture,
        layers=config.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        context_len=config.count("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        eos_token_ids=_eos_token_ids(folder, config),
        tie_embeddings=config.flag("tie_word_embeddings", default=False),
        dtype=_dtype(config),
        rope=_rope(config),
        mla=mla,
        moe=_moe(config) if family == "deepseek" else None,
    )


class _Config:
    """A JSON object whose every complaint names the file and the key. null counts as absent."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = {key: value for key, value in values.items() if value is not None}
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> _Config:
        try:
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read ({error.strerror}): a model folder needs config.json, "
                "*.safetensors and tokenizer.json"
            ) from error
        except msgspec.DecodeError as error:
            raise ModelError(f"{path} is not a JSON object: {error}") from error
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, kind: Any, default: T | None = None) -> Any:  # opaque: kind's type
        """The value as ``kind`` (a type msgspec understands); ModelError where it is not."""
        if key not in self._values:
            if default is not None:
                return default
            raise ModelError(f"{self.path}: key {self._prefix}{key} is missing")
        try:
            return msgspec.convert(self._values[key], kind)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self.path}: key {self._prefix}{key}: {error}") from error

    def count(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        self.require(value >= 1, key, "at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: float = self.get(key, float, default)
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value: bool = self.get(key, bool, default)
        return value

    def word(self, key: str, default: str, known: tuple[str, ...]) -> str:
        value: str = self.get(key, str, default)
        self.require(value in known, key, f"one of {', '.join(known)}")
        return value

    def section(self, key: str) -> _Config:
        values: dict[str, Any] = self.get(key, dict[str, Any], {})
        return _Config(self.path, values, prefix=f"{self._prefix}{key}.")

    def require(self, ok: bool, key: str, supported: str) -> None:
        if not ok:
            value = self._values.get(key)
            raise ModelError(
                f"{self.path}: key {self._prefix}{key} is {value!r}; supported: {supported}"
            )


def _architecture(config: _Config) -> str:
    names: list[str] = config.get("architectures", list[str])
    known = [name for name in names if name in FAMILIES]
    config.require(len(known) == 1, "architectures", f"one of {', '.join(FAMILIES)}")
    return known[0]


def _refuse_unsupported(config: _Config) -> None:
    config.require(
        "quantization_config" not in config,
        "quantization_config",
        "unquantised bfloat16, float16 or float32 weights",
    )
    config.word("hidden_act", "silu", ("silu",))
    for key in ("attention_bias", "mlp_bias"):
        config.require(not config.flag(key, default=False), key, "false")


def _dtype(config: _Config) -> str:
    key = "dtype" if "dtype" in config else "torch_dtype"
    return config.word(key, "bfloat16", ("bfloat16", "float16", "float32"))


def _eos_token_ids(folder: Path, config: _Config) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = _Config.read(path) if path.exists() else config
    source = generation if "eos_token_id" in generation else config
    value: int | list[int] = source.get("eos_token_id", int | list[int], [])
    return (value,) if isinstance(value, int) else tuple(value)


def _rope(config: _Config) -> RopeSpec:
    """Both spellings: rope_theta with rope_scaling, and transformers 5's rope_parameters."""
    scaling = config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    partial = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    scaling.require(partial == 1.0, "partial_rotary_factor", "1.0")
    kind = scaling.word("rope_type" if "rope_type" in scaling else "type", "default", ROPE_KINDS)
    if kind == "default":
        return RopeSpec(theta=theta)
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


def _mla(config: _Config) -> MlaSpec:
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


def _moe(config: _Config) -> MoeSpec | None:
    if "n_routed_experts" not in config:
        return None
    v3 = _architecture(config) == "DeepseekV3ForCausalLM"
    method = config.word("topk_method", "noaux_tc" if v3 else "greedy", GATE_METHODS)
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
    shared = config.get("n_shared_experts", int, 0)
    return MoeSpec(
        experts=experts,
        topk=topk,
        intermediate=config.count("moe_intermediate_size"),
        shared_experts=shared,
        method=method,
        groups=groups,
        topk_groups=topk_groups,
        norm_topk=config.flag("norm_topk_prob", default=v3),
        scaling=config.number("routed_scaling_factor", 1.0),
        first_dense=config.get("first_k_dense_replace", int, 0),
        layer_freq=config.count("moe_layer_freq", 1),
    )
