"""The routed experts of one layer: a gated MLP each, run over tokens grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, dtype as DType

from worker.layers.grouped import GroupedLinear
from worker.layers.parameter import Slots


class Experts:
    """All experts, on this rank. gate and up are one fused matrix."""

    def __init__(self, count: int, hidden: int, intermediate: int, dtype: DType) -> None:
        self._count = count
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        self._gate_up = GroupedLinear(count, hidden, parts, dtype, gated=True)
        self._down = GroupedLinear(count, intermediate, {"down_proj": hidden}, dtype)

    def __len__(self) -> int:
        return self._count

    def slots(self, prefix: str) -> Slots:
        yield from self._gate_up.slots(prefix)
        yield from self._down.slots(prefix)

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def __call__(
        self, x: Float[Tensor, "R hidden"], counts: Sequence[int]
    ) -> Float[Tensor, "R hidden"]:
        """``x`` has ``counts[0]`` rows for expert 0, then ``counts[1]`` for expert 1, and so on."""
        return self._down(self._gate_up(x, counts), counts)
