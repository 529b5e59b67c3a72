"""RMSNorm: x divided by its root mean square, times a learnt weight; computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from worker.layers.parameter import Slot, Slots


class RMSNorm:
    """Normalise the last dimension. ``order`` reorders the weight while loading (see Slot)."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, order: Tensor | None = None
    ) -> None:
        self._eps = eps
        self._shape = (size,)
        self._order = order
        self._weight = torch.empty(size, dtype=dtype)

    def slots(self, prefix: str) -> Slots:
        yield f"{prefix}weight", Slot(self._weight, self._order)

    def __call__(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        return F.rms_norm(x, self._shape, self._weight, self._eps)
