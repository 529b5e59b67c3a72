"""GroupedLinear: a matrix for each group of rows, such as the experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor

from worker.kernels import ops
from worker.layers.linear import can_pack
from worker.layers.parameter import Slot, Slots


class GroupedLinear:
    """``groups`` matrices of the same shape, run in one call. Loaded dense, then packed once.

    ``parts`` names what is fused in every matrix, and ``gated`` is, as in Linear. Packed, a row's
    result is the same bits whatever it is batched with.
    """

    def __init__(
        self,
        groups: int,
        inner: int,
        parts: dict[str, int],
        dtype: torch.dtype,
        *,
        gated: bool = False,
    ) -> None:
        self._parts = parts
        self._gated = gated
        self._outer = sum(parts.values())
        self._weight = torch.empty(groups, self._outer, inner, dtype=dtype)
        self._packed: Int32[Tensor, "groups words"] | None = None

    def slots(self, prefix: str) -> Slots:
        """Where ``{prefix}{group}.{part}.weight`` of a checkpoint go, before ``pack``."""
        for group, weight in enumerate(self._weight):
            start = 0
            for name, size in self._parts.items():
                yield f"{prefix}{group}.{name}.weight", Slot(weight[start : start + size])
                start += size

    def pack(self) -> None:
        """Replace the dense weights by the kernels' layout. Slots handed out become stale."""
        if can_pack(self._weight):
            self._packed = torch.ops.antiphon.pack_linear(self._weight, self._gated)
            self._weight = self._weight.new_empty(0)

    def __call__(
        self, x: Float[Tensor, "rows inner"], counts: Sequence[int]
    ) -> Float[Tensor, "rows outer"]:
        """The first ``counts[0]`` rows by matrix 0, the next ``counts[1]`` by matrix 1, and so on.

        The counts add up to ``rows``.
        """
        if self._packed is not None:
            y: Tensor = torch.ops.antiphon.linear_groups(
                x, self._packed, self._outer, counts, self._gated
            )
            return y
        out = x.new_empty(x.shape[0], self._outer)
        start = 0
        for weight, count in zip(self._weight, counts, strict=True):
            out[start : start + count] = F.linear(x[start : start + count], weight)
            start += count
        return ops.silu_mul(out) if self._gated else out
