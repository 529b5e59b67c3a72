"""Llama: grouped-query attention with rotary positions, and a dense gated MLP."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.layers.linear import Linear
from worker.layers.mlp import GatedMlp
from worker.layers.parameter import Slots, neighbour_rows
from worker.layers.rope import rotate
from worker.model_spec import ModelSpec
from worker.models.decoder import Context, Decoder, Layer


class GroupedQueryAttention:
    """Fused query-key-value projection, rotation, attention, output projection."""

    def __init__(
        self, spec: ModelSpec, index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        self._index = index
        self._backend = backend
        self._heads = spec.heads
        self._kv_heads = spec.kv_heads
        self._head_dim = spec.head_dim
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self._qkv = Linear(
            spec.hidden,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            dtype,
            rows={
                "q_proj": neighbour_rows(spec.heads, 0, spec.head_dim),
                "k_proj": neighbour_rows(spec.kv_heads, 0, spec.head_dim),
            },
        )
        self._out = Linear(queries, {"o_proj": spec.hidden}, dtype)

    def slots(self, prefix: str) -> Slots:
        yield from self._qkv.slots(prefix)
        yield from self._out.slots(prefix)

    def pack(self) -> None:
        self._qkv.pack()
        self._out.pack()

    def __call__(self, x: Float[Tensor, "T hidden"], context: Context) -> Float[Tensor, "T hidden"]:
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)  # [T, heads + 2 kv_heads, dim]
        rotated = rotate(qkv[:, : self._heads + self._kv_heads], context.rotations)
        out = self._backend.mha(
            context.plan,
            self._index,
            rotated[:, : self._heads],
            rotated[:, self._heads :],
            qkv[:, self._heads + self._kv_heads :],
            context.pool,
            1.0 / math.sqrt(self._head_dim),
        )
        return self._out(out.flatten(1))


def build(spec: ModelSpec, dtype: torch.dtype, backend: AttentionBackend) -> Decoder:
    """Allocate a Llama model, to be filled through its slots."""
    layers = [
        Layer(
            spec,
            GroupedQueryAttention(spec, index, backend, dtype),
            GatedMlp(spec.hidden, spec.intermediate, dtype),
            dtype,
        )
        for index in range(spec.layers)
    ]
    return Decoder(spec, layers, backend, dtype)
