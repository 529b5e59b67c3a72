"""ModelSpec: what a model is. Read from config.json by worker/architectures.py. No torch here."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

ROPE_KINDS = ("default", "llama3", "yarn")
GATE_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
LINE_BYTES = 64  # of the processor's cache
PAGE_BYTES = 4096  # of memory
WIDE_BYTES = 1024  # from here on it matters how far apart slots are


class KvBlock(NamedTuple):
    """Layers whose keys and values of one token lie side by side."""

    layers: int
    slot_bytes: int  # from one slot to the next


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
    layers: frozenset[int]  # those with experts; the others have a dense MLP


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is. ``head_dim`` of an MLA model is a whole query head's."""

    architecture: str  # a name in worker/architectures.py
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
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # every query and key head is normalised before it is rotated
    mla: MlaSpec | None = None
    moe: MoeSpec | None = None

    @property
    def kv_numbers_per_token(self) -> int:
        """How many numbers one token keeps in the KV cache, over all layers."""
        if self.mla is not None:
            return self.layers * self.mla.latent_dim
        return self.layers * 2 * self.kv_heads * self.head_dim

    def kv_blocks(self, element_bytes: int) -> tuple[KvBlock, ...]:
        """How a KV pool is cut: a slot of each block takes no more than a page of memory.

        Transfers want few blocks: they pay for each, and each run of slots. Attention reads a row
        of one layer from many slots, and is slower where these are further apart than that.
        """
        layer = self.kv_numbers_per_token // self.layers * element_bytes
        count = -(-self.layers // max(1, PAGE_BYTES // layer))
        each, more = divmod(self.layers, count)
        sizes = [each + (index < more) for index in range(count)]
        return tuple(KvBlock(layers, _apart(layers * layer)) for layers in sizes)

    def kv_slot_bytes(self, element_bytes: int) -> int:
        """Bytes that one token slot takes in a KV pool, over all layers."""
        return sum(block.slot_bytes for block in self.kv_blocks(element_bytes))

    @property
    def rope_dim(self) -> int:
        """How many numbers of a head are rotated."""
        return self.mla.rope_dim if self.mla is not None else self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.layers


def _apart(size: int) -> int:
    """How far apart slots of ``size`` bytes are to be: an odd number of cache lines, if it is much.

    With an even number the rows of one layer compete for a few sets of the cache.
    """
    return size if size < WIDE_BYTES else (-(-size // LINE_BYTES) | 1) * LINE_BYTES
