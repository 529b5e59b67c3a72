"""RMSNorm: x divided by its root mean square, times a learnt weight; computed in fp32."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from worker.kernels import ops
from worker.layers.parameter import Slot, Slots


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

    def of_sum(
        self, x: Float[Tensor, "rows size"], delta: Float[Tensor, "rows size"]
    ) -> Float[Tensor, "rows size"]:
        """Add ``delta`` to ``x`` in place, and normalise the sum."""
        return ops.add_rms_norm(x, delta, self._weight, self._eps)
