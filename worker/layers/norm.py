"""RMSNorm: x divided by its root mean square, times a learnt weight; computed in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from worker.kernels import ops
from worker.layers.parameter import Slot, Slots


@dataclass(frozen=True, slots=True)
class Normed:
    """Rows that are normalised where they are used; ``x`` must not change before that."""

    x: Float[Tensor, "rows size"]
    weight: Float[Tensor, "size"]
    eps: float

    def now(self) -> Float[Tensor, "rows size"]:
        return ops.rms_norm(self.x, self.weight, self.eps)


class RMSNorm:
    """Normalise the last dimension. ``order`` reorders the weight while loading (see Slot)."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, order: Tensor | None = None
    ) -> None:
        self._eps = eps
        self._order = order
        self._weight = torch.empty(size, dtype=dtype)

    def slots(self, prefix: str) -> Slots:
        yield f"{prefix}weight", Slot(self._weight, self._order)

    def __call__(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        return ops.rms_norm(x, self._weight, self._eps)

    def in_place(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        """The same, written over ``x``, which may be a view."""
        return ops.rms_norm_(x, self._weight, self._eps)

    def later(self, x: Float[Tensor, "rows size"]) -> Normed:
        """The same, for a Linear, which normalises the rows while it packs them."""
        return Normed(x, self._weight, self._eps)
