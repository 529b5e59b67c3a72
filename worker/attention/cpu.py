"""The fast attention backend for CPUs: the C++ kernels of worker/kernels over the paged pool.

Keys and values are read where they lie. A decode row is a prompt chunk of one token, so one kernel
serves both, and a token's result is the same bits however its prompt was cut, whatever else is in
the step and however many threads there are. (One exception: a prompt chunk of an MLA model takes
the form, absorbed or expanded, that costs less for its own length.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from worker.attention.base import LatentUp
from worker.attention.cpu_plan import CpuPlan, Sequences, Span
from worker.attention.mla_form import MlaForm, MlaSizes, expands, heads_at_once
from worker.cache.kv_pool import KVPool
from worker.kernels.load import missing as missing  # what the registry asks
from worker.pack import ForwardInput


@dataclass(frozen=True, slots=True)
class PackedUp:
    """An MLA layer's up-projections as the kernels read them."""

    absorb: Int32[
        Tensor, "heads absorb_words"
    ]  # of a query into the latents: the key's, transposed
    key: Int32[Tensor, "heads key_words"]
    value: Int32[Tensor, "heads value_words"]
    sizes: MlaSizes


class CpuAttention:
    """Needs fp32 or bf16. ``mla_form`` fixes the form of MLA prompts; decode rows are absorbed.

    ``share``: whether keys and values that sequences have in common are read once for all of them.
    """

    def __init__(self, mla_form: MlaForm = "auto", *, share: bool = True) -> None:
        self._mla_form = mla_form
        self._share = share

    def plan(self, step: ForwardInput) -> CpuPlan:
        return CpuPlan.of(step, self._share)

    def pack(self, up: LatentUp) -> PackedUp:
        pack = torch.ops.antiphon.pack_linear
        return PackedUp(pack(up.key.transpose(1, 2)), pack(up.key), pack(up.value), MlaSizes.of(up))

    def mha(
        self,
        plan: CpuPlan,
        layer: int,
        q: Float[Tensor, "Q heads dim"],
        k: Float[Tensor, "T kv_heads dim"],
        v: Float[Tensor, "T kv_heads dim"],
        pool: KVPool,
        scale: float,
    ) -> Float[Tensor, "Q heads dim"]:
        """See AttentionBackend."""
        torch.ops.antiphon.scatter_rows(pool.k[layer], plan.write_slots, k)
        torch.ops.antiphon.scatter_rows(pool.v[layer], plan.write_slots, v)
        return plan.sequences.attend(q, pool.k[layer], pool.v[layer], scale)

    def mla(
        self,
        plan: CpuPlan,
        layer: int,
        q: Float[Tensor, "Q heads nope_rope"],
        latent: Float[Tensor, "T latent"],
        up: PackedUp,
        pool: KVPool,
        scale: float,
    ) -> Float[Tensor, "Q heads v_dim"]:
        """See AttentionBackend."""
        cache = pool.latent[layer]
        torch.ops.antiphon.scatter_rows(cache, plan.write_slots, latent)
        expanded = tuple(span for span in plan.prompts if self._expands(span, up, cache))
        if not expanded:
            return _absorbed(q, cache, up, plan.sequences, scale)
        out = q.new_empty(q.shape[0], q.shape[1], up.sizes.value)
        for first, stop, start, end in expanded:
            paged = cache.index_select(0, plan.sequences.slots[start:end])
            out[first:stop] = _expanded(q[first:stop], paged, up, scale)
        rows, rest = plan.without(expanded)
        if len(rows):
            some = _absorbed(q.index_select(0, rows), cache, up, rest, scale)
            out.index_copy_(0, rows, some)
        return out

    def _expands(self, span: Span, up: PackedUp, cache: Tensor) -> bool:
        first, stop, start, end = span
        return expands(self._mla_form, stop - first, end - start, up.sizes, cache.shape[1])


def _absorbed(
    q: Float[Tensor, "n heads nope_rope"],
    cache: Float[Tensor, "slots latent"],
    up: PackedUp,
    sequences: Sequences,
    scale: float,
) -> Float[Tensor, "n heads v_dim"]:
    """Queries that score against latents directly: q · (W c) = (q W) · c."""
    nope, rank, heads = up.sizes.nope, up.sizes.rank, q.shape[1]
    absorbed = q.new_empty(q.shape[0], heads, cache.shape[1])
    torch.ops.antiphon.linear_heads(absorbed[..., :rank], q[..., :nope], up.absorb)
    absorbed[..., rank:] = q[..., nope:]
    shared = cache.unsqueeze(1)  # one key-value head
    attended = sequences.attend(absorbed, shared, shared[..., :rank], scale)
    out = q.new_empty(q.shape[0], heads, up.sizes.value)
    torch.ops.antiphon.linear_heads(out, attended, up.value)
    return out


def _expanded(
    q: Float[Tensor, "queries heads nope_rope"],
    paged: Float[Tensor, "keys latent"],
    up: PackedUp,
    scale: float,
) -> Float[Tensor, "queries heads v_dim"]:
    """Ordinary attention over expanded keys and values, some heads at a time to bound memory."""
    nope, rank, heads = up.sizes.nope, up.sizes.rank, q.shape[1]
    keys, head_dim, v_dim = paged.shape[0], q.shape[2], up.sizes.value
    at_once = min(heads, heads_at_once(keys, head_dim))
    sequence = Sequences.of([(0, q.shape[0], 0, keys)], torch.arange(keys))
    out = q.new_empty(q.shape[0], heads, v_dim)
    for first in range(0, heads, at_once):
        part = slice(first, min(first + at_once, heads))
        c = paged[:, :rank].unsqueeze(1).expand(-1, part.stop - first, -1)
        k = q.new_empty(keys, part.stop - first, head_dim)
        torch.ops.antiphon.linear_heads(k[..., :nope], c, up.key[part])
        k[..., nope:] = paged[:, rank:].unsqueeze(1)  # the rotary key is the same for all heads
        v = q.new_empty(keys, part.stop - first, v_dim)
        torch.ops.antiphon.linear_heads(v, c, up.value[part])
        out[:, part] = sequence.attend(q[:, part], k, v, scale)
    return out
