"""Decoder: embedding, layers of attention and MLP with residuals, norm, LM head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.cache.kv_pool import KVPool
from worker.layers.embedding import Embedding, LmHead
from worker.layers.norm import Normed, RMSNorm
from worker.layers.parameter import Slots
from worker.layers.rope import Rope
from worker.model_spec import ModelSpec
from worker.models.context import Context
from worker.models.stack import Stack
from worker.pack import ForwardInput, ends_only


@runtime_checkable
class Attention(Protocol):
    """The attention half of one layer, projections included."""

    def slots(self, prefix: str) -> Slots: ...

    def pack(self) -> None: ...

    def add_to(self, onto: Float[Tensor, "A hidden"], x: Normed, context: Context) -> None:
        """Add the result for T tokens to ``onto``: ``A`` is T, or those of ``context.asking``."""
        ...


@runtime_checkable
class Mlp(Protocol):
    """The other half of one layer: dense or a mixture of experts."""

    def slots(self, prefix: str) -> Slots: ...

    def pack(self) -> None: ...

    def add_to(self, onto: Float[Tensor, "T hidden"], x: Normed) -> None: ...


class Layer:
    """Pre-norm residual layer."""

    def __init__(self, spec: ModelSpec, attention: Attention, mlp: Mlp, dtype: torch.dtype) -> None:
        self._attention = attention
        self._mlp = mlp
        self._before_attention = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self._before_mlp = RMSNorm(spec.hidden, spec.norm_eps, dtype)

    def slots(self, prefix: str) -> Slots:
        yield from self._before_attention.slots(f"{prefix}input_layernorm.")
        yield from self._attention.slots(f"{prefix}self_attn.")
        yield from self._before_mlp.slots(f"{prefix}post_attention_layernorm.")
        yield from self._mlp.slots(f"{prefix}mlp.")

    def pack(self) -> None:
        self._attention.pack()
        self._mlp.pack()

    def __call__(self, x: Float[Tensor, "T hidden"], context: Context) -> Float[Tensor, "A hidden"]:
        """Add both halves to the residual stream ``x``, in place or to a copy of who asks."""
        out = context.of_asking(x)
        self._attention.add_to(out, self._before_attention.later(x), context)
        self._mlp.add_to(out, self._before_mlp.later(out))
        return out


class Decoder:
    """A decoder-only language model; implements Model."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer],
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self._backend = backend
        self._layers = tuple(layers)
        self._stack = Stack(self._layers)
        self._rope = Rope(spec.rope, spec.rope_dim, spec.context_len)
        self._embedding = Embedding(spec.vocab, spec.hidden, dtype)
        self._norm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self._head = LmHead(self._embedding, tied=spec.tie_embeddings)

    def slots(self) -> Slots:
        yield from self._embedding.slots("model.embed_tokens.")
        for index, layer in enumerate(self._layers):
            yield from layer.slots(f"model.layers.{index}.")
        yield from self._norm.slots("model.norm.")
        yield from self._head.slots()

    def pack(self) -> None:
        for layer in self._layers:
            layer.pack()
        self._head.pack()

    @torch.inference_mode()
    def forward(self, step: ForwardInput, pool: KVPool) -> Float[Tensor, "L vocab"]:
        """See Model."""
        context = Context(self._backend.plan(step), self._rope.at(step.positions), pool)
        x = self._embedding(step.token_ids)
        ends = ends_only(step)
        if ends is None:
            x = self._stack(x, context).index_select(0, step.logit_rows)
        else:
            last = replace(context, plan=self._backend.plan(ends.step), asking=ends.asking)
            x = self._stack.to_ends(x, context, last).index_select(0, ends.logit_rows)
        return self._head(self._norm.later(x))
