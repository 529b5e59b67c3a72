"""The gate: which experts a token goes to, and with what weight. Scores are fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from worker.layers.linear import Linear
from worker.layers.parameter import Slot, Slots
from worker.model_spec import MoeSpec


@dataclass(frozen=True, slots=True)
class Routing:
    """Expert ids and weights of every token, in no particular order."""

    experts: Int64[Tensor, "T topk"]
    weights: Float[Tensor, "T topk"]  # fp32; routed_scaling_factor is in them


class Gate:
    """Top-k gate: DeepSeek-V2's softmax (plain or by groups), or V3's sigmoid with bias."""

    def __init__(self, spec: MoeSpec, hidden: int) -> None:
        self._spec = spec
        self._scores = Linear(hidden, {"gate": spec.experts}, torch.float32)
        self._bias = (
            torch.empty(spec.experts, dtype=torch.float32) if spec.method == "noaux_tc" else None
        )

    def slots(self, prefix: str) -> Slots:
        yield from self._scores.slots(prefix)
        if self._bias is not None:
            yield f"{prefix}gate.e_score_correction_bias", Slot(self._bias)

    def pack(self) -> None:
        self._scores.pack()

    def __call__(self, x: Float[Tensor, "T hidden"]) -> Routing:
        return route(self._spec, self._scores(x.float()), self._bias)


def route(
    spec: MoeSpec, logits: Float[Tensor, "T experts"], bias: Float[Tensor, "experts"] | None
) -> Routing:
    """Choose ``spec.topk`` experts a token.

    The bias, where there is one, moves the choice alone: weights are the plain scores.
    """
    scores = logits.softmax(dim=-1) if bias is None else _sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if spec.method != "greedy":
        choice = _in_best_groups(spec, choice)
    experts = choice.topk(spec.topk, dim=-1, sorted=False).indices
    weights = scores.gather(1, experts)
    if spec.norm_topk:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * spec.scaling)


def _sigmoid(x: Float[Tensor, "T experts"]) -> Float[Tensor, "T experts"]:
    """A token's bits do not depend on how many others there are: torch's fp32 form differs in the
    last one between whole vectors of a tensor and the rest, and fp64 rounds that away."""
    return x.double().sigmoid().to(x.dtype)


def _in_best_groups(
    spec: MoeSpec, choice: Float[Tensor, "T experts"]
) -> Float[Tensor, "T experts"]:
    """-inf outside the best ``topk_groups`` groups; -inf and not 0, as a bias may be negative.

    A group is worth its best expert (V2), or the sum of its two best (V3).
    """
    size = choice.shape[1] // spec.groups
    grouped = choice.view(choice.shape[0], spec.groups, size)
    best = min(2 if spec.method == "noaux_tc" else 1, grouped.shape[-1])
    worth = grouped.topk(best, dim=-1).values.sum(dim=-1)  # [T, groups]
    kept = worth.topk(spec.topk_groups, dim=-1, sorted=False).indices
    dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
