"""Linear: y = x Wᵀ + b over one or several fused matrices, prepacked for oneDNN where it can be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from worker.layers.parameter import Slot, Slots

# Packing for one row makes 16 rows 30 % slower; packing for 16 costs one row nothing.
PACK_ROWS = 16


class Linear:
    """Matrices with a common input, fused into one. Loaded dense, then packed once.

    ``parts`` names the fused matrices and their rows in order: ``{"q_proj": 576, ...}``.
    ``bias``: whether every part has one. ``rows`` may reorder a part's rows while loading (see
    ``neighbour_rows``).
    """

    def __init__(
        self,
        inner: int,
        parts: dict[str, int],
        dtype: torch.dtype,
        *,
        bias: bool = False,
        rows: dict[str, Tensor] | None = None,
    ) -> None:
        self._parts = parts
        self._rows = rows or {}
        self._weight = torch.empty(sum(parts.values()), inner, dtype=dtype)
        self._bias = torch.empty(sum(parts.values()), dtype=dtype) if bias else None
        self._packed = False

    @classmethod
    def over(cls, weight: Float[Tensor, "outer inner"]) -> Linear:
        """A linear over a weight that someone else loads; packing copies it."""
        linear = cls(weight.shape[1], {}, weight.dtype)
        linear._weight = weight
        return linear

    def widened(self) -> Linear:
        """The same in fp32. Call before ``pack``."""
        return Linear.over(self._weight.float())

    def slots(self, prefix: str) -> Slots:
        """Where ``{prefix}{part}.weight`` (and ``.bias``) of a checkpoint go, before ``pack``."""
        start = 0
        for name, size in self._parts.items():
            own, rows = slice(start, start + size), self._rows.get(name)
            yield f"{prefix}{name}.weight", Slot(self._weight[own], rows)
            if self._bias is not None:
                yield f"{prefix}{name}.bias", Slot(self._bias[own], rows)
            start += size

    def pack(self) -> None:
        """Replace the dense weight by oneDNN's own layout. Slots handed out become stale."""
        self._rows = {}
        if can_pack(self._weight):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, PACK_ROWS)
            self._packed = True

    def __call__(self, x: Float[Tensor, "rows inner"]) -> Float[Tensor, "rows outer"]:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        if x.shape[0] == 1 and x.dtype == torch.float32:
            # with one row oneDNN sums in another order; two rows keep a row's result the same
            # whatever it is batched with
            return _packed_linear(x.expand(2, -1).contiguous(), self._weight, self._bias)[:1]
        return _packed_linear(x, self._weight, self._bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can prepack this weight here."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call] # torch's own
    if weight.device.type != "cpu" or not available:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
