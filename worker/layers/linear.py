"""Linear: y = x Wᵀ + b over one or several fused matrices, packed where the kernels take it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor

from worker.kernels import ops
from worker.kernels.load import suits
from worker.layers.norm import Normed
from worker.layers.parameter import Slot, Slots


class Linear:
    """Matrices with a common input, fused into one. Loaded dense, then packed once.

    ``parts`` names the fused matrices and their rows in order: ``{"q_proj": 576, ...}``.
    ``bias``: whether every part has one. ``rows`` may reorder a part's rows while loading (see
    ``neighbour_rows``). ``wide``: results are fp32 and never rounded to the weight's dtype.
    ``gated``: the result is silu(first half) * second half, and half as wide.

    Packed, a row's result is the same bits whatever it is batched with.
    """

    def __init__(
        self,
        inner: int,
        parts: dict[str, int],
        dtype: torch.dtype,
        *,
        bias: bool = False,
        rows: dict[str, Tensor] | None = None,
        wide: bool = False,
        gated: bool = False,
    ) -> None:
        self._parts = parts
        self._rows = rows or {}
        self._wide = wide
        self._gated = gated
        self._outer = sum(parts.values())
        self._weight = torch.empty(self._outer, inner, dtype=dtype)
        self._bias = torch.empty(self._outer, dtype=dtype) if bias else None
        self._packed: Int32[Tensor, "words"] | None = None

    @classmethod
    def over(cls, weight: Float[Tensor, "outer inner"], *, wide: bool = False) -> Linear:
        """A linear over a weight that someone else loads; packing copies it."""
        linear = cls(weight.shape[1], {}, weight.dtype, wide=wide)
        linear._outer, linear._weight = weight.shape[0], weight
        return linear

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
        """Replace the dense weight by the kernels' layout. Slots handed out become stale."""
        self._rows = {}
        if can_pack(self._weight):
            self._packed = torch.ops.antiphon.pack_linear(self._weight, self._gated)
            self._weight = self._weight.new_empty(0)
        elif self._wide:
            self._weight = self._weight.float()

    def __call__(self, x: Float[Tensor, "rows inner"] | Normed) -> Float[Tensor, "rows outer"]:
        if self._packed is None:
            return self._by_torch(x)
        rows, norm, eps = _operand(x)
        y: Tensor = torch.ops.antiphon.linear(
            rows, self._packed, self._outer, self._bias, self._wide, norm, eps, self._gated
        )
        return y

    def add_to(
        self, onto: Float[Tensor, "rows outer"], x: Float[Tensor, "rows inner"] | Normed
    ) -> None:
        """Add the result to ``onto`` in place. Not for a gated one."""
        if self._packed is None:
            onto.add_(self._by_torch(x))
            return
        rows, norm, eps = _operand(x)
        torch.ops.antiphon.linear_onto(onto, rows, self._packed, self._bias, norm, eps)

    def _by_torch(self, x: Float[Tensor, "rows inner"] | Normed) -> Float[Tensor, "rows outer"]:
        rows = x.now() if isinstance(x, Normed) else x
        if self._wide:
            return F.linear(rows.float(), self._weight.float(), self._bias)
        y = F.linear(rows, self._weight, self._bias)
        return ops.silu_mul(y) if self._gated else y


def _operand(x: Tensor | Normed) -> tuple[Tensor, Tensor | None, float]:
    """Rows, and the weight and epsilon of their norm."""
    return (x.x, x.weight, x.eps) if isinstance(x, Normed) else (x, None, 0.0)


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels take this weight: they read bf16 numbers in pairs."""
    return suits(weight) and (weight.dtype == torch.float32 or weight.shape[-1] % 2 == 0)
