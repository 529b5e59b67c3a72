"""AttentionBackend: attention over the paged KV pool; registry.py has its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from worker.cache.kv_pool import KVPool
from worker.pack import ForwardInput


@dataclass(frozen=True, slots=True)
class LatentUp:
    """The two up-projections of an MLA latent, head by head (kv_b_proj of a checkpoint).

    key part = key @ c and value = value @ c, with c the first ``rank`` numbers of the latent.
    """

    key: Float[Tensor, "heads nope rank"]
    value: Float[Tensor, "heads v_dim rank"]


@runtime_checkable
class AttentionBackend(Protocol):
    """Causal attention for any mix of prompt chunks and decode rows in one step.

    ``mha`` and ``mla`` first write the step's new keys and values into ``pool`` at the step's write
    slots, then let every query attend to its own sequence up to itself. There is a query for each
    token; or, where the plan is of ``pack.ends_only``, for some. ``scale`` multiplies the scores.
    Softmax and accumulation are fp32. Implementations keep nothing between steps.
    """

    def plan(self, step: ForwardInput) -> Any:
        """What all layers of this step share; opaque to callers. Made once per step."""
        ...

    def pack(self, up: LatentUp) -> Any:
        """The up-projections in the form that ``mla`` takes. Made once, after loading."""
        ...

    def mha(
        self,
        plan: Any,  # opaque: from plan()
        layer: int,
        q: Float[Tensor, "Q heads dim"],
        k: Float[Tensor, "T kv_heads dim"],
        v: Float[Tensor, "T kv_heads dim"],
        pool: KVPool,
        scale: float,
    ) -> Float[Tensor, "Q heads dim"]:
        """Multi-head or grouped-query attention; ``heads`` is a multiple of ``kv_heads``."""
        ...

    def mla(
        self,
        plan: Any,  # opaque: from plan()
        layer: int,
        q: Float[Tensor, "Q heads nope_rope"],
        latent: Float[Tensor, "T latent"],
        up: Any,  # opaque: from pack()
        pool: KVPool,
        scale: float,
    ) -> Float[Tensor, "Q heads v_dim"]:
        """Multi-head latent attention.

        A query head is ``nope`` numbers, then the rotated ones; ``latent`` is the normalised c,
        then the rotated key that all heads share.
        """
        ...
