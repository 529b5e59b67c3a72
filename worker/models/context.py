"""Context: what all layers of one step share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Complex64, Float, Int64
from torch import Tensor

from worker.cache.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class Context:
    """What all layers of one step share."""

    plan: Any  # opaque: the attention backend's
    rotations: Complex64[Tensor, "T 1 pairs"]
    pool: KVPool
    # Whose results are read, in a last layer; None: all. Keys and values are those of all tokens.
    asking: Int64[Tensor, "A"] | None = None

    def of_asking(self, x: Float[Tensor, "T *shape"]) -> Float[Tensor, "A *shape"]:
        """The rows of those whose results are read."""
        return x if self.asking is None else x.index_select(0, self.asking)
