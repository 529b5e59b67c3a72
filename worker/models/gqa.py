"""Grouped-query attention: the projections around the backend's attention over keys and values."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.kernels import ops
from worker.layers.linear import Linear
from worker.layers.norm import Normed, RMSNorm
from worker.layers.parameter import Slots, neighbour_rows
from worker.model_spec import ModelSpec
from worker.models.context import Context


class GroupedQueryAttention:
    """Query-key-value projection (fused), norms of heads, rotation, attention, output."""

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
            bias=spec.qkv_bias,
            rows={
                "q_proj": neighbour_rows(spec.heads, 0, spec.head_dim),
                "k_proj": neighbour_rows(spec.kv_heads, 0, spec.head_dim),
            },
        )
        self._head_norms: tuple[RMSNorm, RMSNorm] | None = None  # of queries, of keys
        if spec.qk_norm:
            order = neighbour_rows(1, 0, spec.head_dim)
            self._head_norms = (
                RMSNorm(spec.head_dim, spec.norm_eps, dtype, order),
                RMSNorm(spec.head_dim, spec.norm_eps, dtype, order),
            )
        self._out = Linear(queries, {"o_proj": spec.hidden}, dtype, bias=spec.out_bias)

    def slots(self, prefix: str) -> Slots:
        yield from self._qkv.slots(prefix)
        if self._head_norms is not None:
            for name, norm in zip(("q_norm", "k_norm"), self._head_norms, strict=True):
                yield from norm.slots(f"{prefix}{name}.")
        yield from self._out.slots(prefix)

    def pack(self) -> None:
        self._qkv.pack()
        self._out.pack()

    def add_to(self, onto: Float[Tensor, "A hidden"], x: Normed, context: Context) -> None:
        """See Attention."""
        qkv = self._qkv(x).view(x.x.shape[0], -1, self._head_dim)  # [T, heads + 2 kv_heads, dim]
        turned = qkv[:, : self._heads + self._kv_heads]
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            q_norm.in_place(turned[:, : self._heads])
            k_norm.in_place(turned[:, self._heads :])
        ops.rotate_(turned, context.rotations)
        out = self._backend.mha(
            context.plan,
            self._index,
            context.of_asking(turned[:, : self._heads]),
            turned[:, self._heads :],
            qkv[:, self._heads + self._kv_heads :],
            context.pool,
            1.0 / math.sqrt(self._head_dim),
        )
        self._out.add_to(onto, out.flatten(1))
