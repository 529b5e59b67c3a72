"""Context: what all layers of one step share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Complex64
from torch import Tensor

from worker.cache.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class Context:
    """What all layers of one step share."""

    plan: Any  # opaque: the attention backend's
    rotations: Complex64[Tensor, "T 1 pairs"]
    pool: KVPool
