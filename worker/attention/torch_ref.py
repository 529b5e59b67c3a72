"""The reference attention backend: plain torch over the paged pool, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from worker.attention.base import LatentUp
from worker.attention.mla_form import MlaForm, MlaSizes, expands, heads_at_once
from worker.attention.torch_plan import DecodeBatch, Extend, TorchPlan, make_plan
from worker.cache.kv_pool import KVPool
from worker.pack import ForwardInput


class TorchAttention:
    """Gathers a sequence's pages, then runs scaled_dot_product_attention.

    ``mla_form`` fixes the form of MLA prompts; "auto" takes the one with fewer operations.
    """

    def __init__(self, mla_form: MlaForm = "auto") -> None:
        self._mla_form = mla_form

    def plan(self, step: ForwardInput) -> TorchPlan:
        return make_plan(step)

    def pack(self, up: LatentUp) -> LatentUp:
        """As they are."""
        return up

    def mha(
        self,
        plan: TorchPlan,
        layer: int,
        q: Float[Tensor, "Q heads dim"],
        k: Float[Tensor, "T kv_heads dim"],
        v: Float[Tensor, "T kv_heads dim"],
        pool: KVPool,
        scale: float,
    ) -> Float[Tensor, "Q heads dim"]:
        """See AttentionBackend."""
        keys, values = pool.k[layer], pool.v[layer]
        keys.index_copy_(0, plan.write_slots, k)
        values.index_copy_(0, plan.write_slots, v)
        out = torch.empty_like(q)
        for batch in plan.decodes:
            paged_k = _pages(keys, batch).transpose(1, 2)
            paged_v = _pages(values, batch).transpose(1, 2)
            out.index_copy_(
                0,
                batch.rows,
                _decode(q.index_select(0, batch.rows), paged_k, paged_v, batch, scale),
            )
        for row in plan.extends:
            paged_k = keys.index_select(0, row.slots).transpose(0, 1)
            paged_v = values.index_select(0, row.slots).transpose(0, 1)
            out[row.start : row.stop] = _extend(q, paged_k, paged_v, row, scale)
        return out

    def mla(
        self,
        plan: TorchPlan,
        layer: int,
        q: Float[Tensor, "Q heads nope_rope"],
        latent: Float[Tensor, "T latent"],
        up: LatentUp,
        pool: KVPool,
        scale: float,
    ) -> Float[Tensor, "Q heads v_dim"]:
        """See AttentionBackend. Decode rows are always absorbed."""
        cache = pool.latent[layer]
        cache.index_copy_(0, plan.write_slots, latent)
        out = q.new_empty(q.shape[0], q.shape[1], up.value.shape[1])
        for batch in plan.decodes:
            paged = _pages(cache, batch).unsqueeze(1)  # one key-value head
            attended = _decode(
                _absorb(q.index_select(0, batch.rows), up), paged, paged, batch, scale
            )
            out.index_copy_(0, batch.rows, _values(attended, up))
        for row in plan.extends:
            paged = cache.index_select(0, row.slots)  # [keys, latent]
            if self._expands(row, up, paged.shape[1]):
                out[row.start : row.stop] = _expanded(q, paged, up, row, scale)
            else:
                out[row.start : row.stop] = _absorbed(q, paged, up, row, scale)
        return out

    def _expands(self, row: Extend, up: LatentUp, latent: int) -> bool:
        queries, keys = row.stop - row.start, row.slots.shape[0]
        return expands(self._mla_form, queries, keys, MlaSizes.of(up), latent)


def _pages(cache: Float[Tensor, "slots *shape"], batch: DecodeBatch) -> Float[Tensor, "n P *shape"]:
    return cache.index_select(0, batch.slots).view(batch.rows.shape[0], -1, *cache.shape[1:])


def _decode(
    q: Float[Tensor, "n heads dim"],
    k: Float[Tensor, "n kv_heads P dim"],
    v: Float[Tensor, "n kv_heads P dim"],
    batch: DecodeBatch,
    scale: float,
) -> Float[Tensor, "n heads dim"]:
    # the query heads of one KV head are the rows of one product; enable_gqa is several times slower
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])  # [n, kv_heads, group, dim]
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=batch.mask, scale=scale)
    return out.flatten(1, 2)


def _extend(
    q: Float[Tensor, "T heads dim"],
    k: Float[Tensor, "kv_heads keys dim"],
    v: Float[Tensor, "kv_heads keys dim"],
    row: Extend,
    scale: float,
) -> Float[Tensor, "queries heads dim"]:
    group = q.shape[1] // k.shape[0]
    k = k.unsqueeze(1).expand(-1, group, -1, -1)
    v = v.unsqueeze(1).expand(-1, group, -1, -1)
    outs = []
    for block in row.blocks:
        queries = q[block.start : block.stop].transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            queries.reshape(-1, group, *queries.shape[1:]),  # [kv_heads, group, queries, dim]
            k[:, :, : block.keys],
            v[:, :, : block.keys],
            attn_mask=block.mask,
            scale=scale,
        )
        outs.append(attended.flatten(0, 1).transpose(0, 1))
    return torch.cat(outs)


def _absorb(q: Float[Tensor, "n heads nope_rope"], up: LatentUp) -> Float[Tensor, "n heads latent"]:
    """Queries that score against latents directly: q · (W c) = (q W) · c."""
    nope = up.key.shape[1]
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), up.key).transpose(0, 1)
    return torch.cat((absorbed, q[..., nope:]), dim=-1)


def _values(
    attended: Float[Tensor, "n heads latent"], up: LatentUp
) -> Float[Tensor, "n heads v_dim"]:
    """Values from averaged latents."""
    # the keys' rotary part was averaged too: SDPA is slow where values are narrower than keys
    c = attended[..., : up.value.shape[2]]
    return torch.bmm(c.transpose(0, 1), up.value.transpose(1, 2)).transpose(0, 1)


def _absorbed(
    q: Float[Tensor, "T heads nope_rope"],
    paged: Float[Tensor, "keys latent"],
    up: LatentUp,
    row: Extend,
    scale: float,
) -> Float[Tensor, "queries heads v_dim"]:
    shared = paged.unsqueeze(0)  # one key-value head
    out = _extend(_absorb(q, up), shared, shared, row, scale)
    return _values(out, up)


def _expanded(
    q: Float[Tensor, "T heads nope_rope"],
    paged: Float[Tensor, "keys latent"],
    up: LatentUp,
    row: Extend,
    scale: float,
) -> Float[Tensor, "queries heads v_dim"]:
    """Ordinary attention over expanded keys and values, some heads at a time to bound memory."""
    heads, v_dim, rank = up.value.shape
    keys, head_dim = paged.shape[0], q.shape[2]
    at_once = heads_at_once(keys, head_dim)
    c = paged[:, :rank].t()  # [rank, keys]
    shared = paged[:, rank:].unsqueeze(0)  # the rotary key, the same for all heads
    outs = []
    for first in range(0, heads, at_once):
        part = slice(first, first + at_once)
        plain = torch.matmul(up.key[part], c).transpose(1, 2)  # [heads, keys, nope]
        k = torch.cat((plain, shared.expand(plain.shape[0], -1, -1)), dim=-1)
        v = torch.matmul(up.value[part], c).transpose(1, 2)
        width = max(head_dim, v_dim)  # SDPA is slow where keys and values differ in width
        padded = F.pad(q[:, part], (0, width - head_dim))
        k, v = F.pad(k, (0, width - head_dim)), F.pad(v, (0, width - v_dim))
        outs.append(_extend(padded, k, v, row, scale)[..., :v_dim])
    return torch.cat(outs, dim=1)
