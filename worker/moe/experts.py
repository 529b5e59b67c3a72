"""The routed experts of one layer: a gated MLP each, run over tokens grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from worker.layers.mlp import GatedMlp
from worker.layers.parameter import Slots


class Experts:
    """All experts, on this rank."""

    def __init__(self, count: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        self._experts = tuple(GatedMlp(hidden, intermediate, dtype) for _ in range(count))

    def __len__(self) -> int:
        return len(self._experts)

    def slots(self, prefix: str) -> Slots:
        for index, expert in enumerate(self._experts):
            yield from expert.slots(f"{prefix}{index}.")

    def pack(self) -> None:
        for expert in self._experts:
            expert.pack()

    def __call__(
        self, x: Float[Tensor, "R hidden"], counts: Sequence[int]
    ) -> Float[Tensor, "R hidden"]:
        """``x`` has ``counts[0]`` rows for expert 0, then ``counts[1]`` for expert 1, and so on."""
        out = torch.empty_like(x)
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                out[start : start + count] = expert(x[start : start + count])
                start += count
        return out
