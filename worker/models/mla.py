"""Multi-head latent attention: the projections around the backend's attention over latents."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from worker.attention.base import AttentionBackend, LatentUp
from worker.kernels import ops
from worker.layers.linear import Linear
from worker.layers.norm import Normed, RMSNorm
from worker.layers.parameter import Slot, Slots, neighbour_rows
from worker.layers.rope import softmax_scale
from worker.model_spec import MlaSpec, ModelSpec
from worker.models.context import Context

LATENT_NORM_EPS = 1e-6  # of the norms inside MLA; checkpoints do not name it


class LatentAttention:
    """Down-projection of queries and keys-values (fused), norms, rotation, attention, output."""

    def __init__(
        self,
        spec: ModelSpec,
        mla: MlaSpec,
        index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        self._index = index
        self._backend = backend
        self._spec = mla
        self._heads = spec.heads
        self._scale = softmax_scale(spec.rope, spec.head_dim)
        queries = spec.heads * spec.head_dim
        q_rows, kv_rows = _row_orders(spec, mla)
        # V2-Lite has no low-rank step: its full queries are fused with the latent instead
        first = {"q_proj": queries} if mla.q_lora_rank is None else {"q_a_proj": mla.q_lora_rank}
        self._down = Linear(
            spec.hidden,
            first | {"kv_a_proj_with_mqa": mla.latent_dim},
            dtype,
            rows=kv_rows | (q_rows if mla.q_lora_rank is None else {}),
        )
        self._q_norm: RMSNorm | None = None
        self._q_up: Linear | None = None
        if mla.q_lora_rank is not None:
            self._q_norm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS, dtype)
            self._q_up = Linear(mla.q_lora_rank, {"q_b_proj": queries}, dtype, rows=q_rows)
        self._kv_norm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS, dtype)
        self._kv_up = torch.empty(
            spec.heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank, dtype=dtype
        )
        by_head = self._kv_up.view(spec.heads, -1, mla.kv_lora_rank)  # [heads, nope + v, rank]
        self._up = LatentUp(by_head[:, : mla.nope_dim], by_head[:, mla.nope_dim :])
        self._packed_up: Any = None  # opaque: the backend's
        self._out = Linear(spec.heads * mla.v_dim, {"o_proj": spec.hidden}, dtype)

    def slots(self, prefix: str) -> Slots:
        yield from self._down.slots(prefix)
        if self._q_norm is not None and self._q_up is not None:
            yield from self._q_norm.slots(f"{prefix}q_a_layernorm.")
            yield from self._q_up.slots(prefix)
        yield from self._kv_norm.slots(f"{prefix}kv_a_layernorm.")
        yield f"{prefix}kv_b_proj.weight", Slot(self._kv_up)
        yield from self._out.slots(prefix)

    def pack(self) -> None:
        self._down.pack()
        if self._q_up is not None:
            self._q_up.pack()
        self._packed_up = self._backend.pack(self._up)
        self._out.pack()

    def add_to(self, onto: Float[Tensor, "A hidden"], x: Normed, context: Context) -> None:
        """See Attention."""
        mla = self._spec
        down = self._down(x)
        q, latent = down[:, : -mla.latent_dim], down[:, -mla.latent_dim :]
        if self._q_norm is not None and self._q_up is not None:
            q = self._q_up(self._q_norm.later(q))
        q = q.view(q.shape[0], self._heads, -1)  # [T, heads, nope + rope]
        ops.rotate_(q[..., mla.nope_dim :], context.rotations)
        self._kv_norm.in_place(latent[:, : mla.kv_lora_rank])
        ops.rotate_(latent[:, mla.kv_lora_rank :].unsqueeze(1), context.rotations)
        out = self._backend.mla(
            context.plan,
            self._index,
            context.of_asking(q),
            latent,
            self._packed_up or self._backend.pack(self._up),
            context.pool,
            self._scale,
        )
        self._out.add_to(onto, out.flatten(1))


def _row_orders(spec: ModelSpec, mla: MlaSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How query and latent rows are reordered while loading, where pairs are not neighbours."""
    if mla.interleaved:
        return {}, {}
    q_rows = neighbour_rows(spec.heads, mla.nope_dim, mla.rope_dim)
    kv_rows = neighbour_rows(1, mla.kv_lora_rank, mla.rope_dim)
    name = "q_proj" if mla.q_lora_rank is None else "q_b_proj"
    return {name: q_rows}, {"kv_a_proj_with_mqa": kv_rows}
