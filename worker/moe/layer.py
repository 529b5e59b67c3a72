"""MoE layer as stages: gate, group by expert, experts, combine; plus the shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from worker.kernels import ops
from worker.layers.mlp import GatedMlp
from worker.layers.norm import Normed
from worker.layers.parameter import Slots
from worker.model_spec import MoeSpec
from worker.moe.experts import Experts
from worker.moe.gate import Gate, Routing


@dataclass(frozen=True, slots=True)
class Grouped:
    """Token copies sorted by expert."""

    x: Float[Tensor, "R hidden"]  # R = T * topk
    order: Int64[Tensor, "R"]  # row r is choice order[r] % topk of token order[r] // topk
    counts: list[int]  # rows of each expert


class MoeLayer:
    """Routed experts weighted by the gate, plus shared experts that see every token."""

    def __init__(self, spec: MoeSpec, hidden: int, dtype: torch.dtype) -> None:
        self._gate = Gate(spec, hidden)
        self._experts = Experts(spec.experts, hidden, spec.intermediate, dtype)
        self._shared = (
            GatedMlp(hidden, spec.intermediate * spec.shared_experts, dtype)
            if spec.shared_experts
            else None
        )

    def slots(self, prefix: str) -> Slots:
        yield from self._gate.slots(prefix)
        yield from self._experts.slots(f"{prefix}experts.")
        if self._shared is not None:
            yield from self._shared.slots(f"{prefix}shared_experts.")

    def pack(self) -> None:
        self._gate.pack()
        self._experts.pack()
        if self._shared is not None:
            self._shared.pack()

    def add_to(self, onto: Float[Tensor, "T hidden"], x: Normed) -> None:
        """Add the result to ``onto`` in place."""
        rows = x.now()
        routing = self._gate(rows)
        grouped = group(rows, routing, len(self._experts))
        out = combine(self._experts(grouped.x, grouped.counts), grouped, routing)
        if self._shared is not None:
            self._shared.add_to(out, rows)
        ops.add_(onto, out)


def group(x: Float[Tensor, "T hidden"], routing: Routing, experts: int) -> Grouped:
    """Copy every token once per chosen expert, sorted by expert."""
    chosen = routing.experts.flatten()
    order = chosen.argsort(stable=True)
    copies = x.index_select(0, order // routing.experts.shape[1])
    counts: list[int] = torch.bincount(chosen, minlength=experts).tolist()
    return Grouped(copies, order, counts)


def combine(
    y: Float[Tensor, "R hidden"], grouped: Grouped, routing: Routing
) -> Float[Tensor, "T hidden"]:
    """Sum each token's expert outputs by weight, in fp32 and in the order of its choices."""
    unsorted = torch.empty_like(y).index_copy_(0, grouped.order, y)
    choices = unsorted.view(*routing.weights.shape, y.shape[-1])  # [T, topk, hidden]
    return (choices * routing.weights.unsqueeze(-1)).sum(dim=1).to(y.dtype)
