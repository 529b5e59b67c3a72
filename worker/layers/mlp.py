"""Gated MLP: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from worker.layers.linear import Linear
from worker.layers.norm import Normed
from worker.layers.parameter import Slots


class GatedMlp:
    """gate and up are one fused matrix."""

    def __init__(
        self, hidden: int, intermediate: int, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        self._gate_up = Linear(hidden, parts, dtype, bias=bias, gated=True)
        self._down = Linear(intermediate, {"down_proj": hidden}, dtype, bias=bias)

    def slots(self, prefix: str) -> Slots:
        yield from self._gate_up.slots(prefix)
        yield from self._down.slots(prefix)

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def add_to(
        self, onto: Float[Tensor, "T hidden"], x: Float[Tensor, "T hidden"] | Normed
    ) -> None:
        """Add the result to ``onto`` in place."""
        self._down.add_to(onto, self._gate_up(x))
