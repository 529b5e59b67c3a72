"""Model: a step in, logits out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from worker.cache.kv_pool import KVPool
from worker.layers.parameter import Slots
from worker.model_spec import ModelSpec
from worker.pack import ForwardInput


@runtime_checkable
class Model(Protocol):
    """A loaded model. It keeps nothing of a step: all state is in the pool."""

    spec: ModelSpec

    def forward(self, step: ForwardInput, pool: KVPool) -> Float[Tensor, "L vocab"]:
        """Run one step: write its KV into ``pool``, return fp32 logits of ``step.logit_rows``."""
        ...

    def slots(self) -> Slots:
        """Every tensor of the checkpoint by name, and where it goes. Call before ``pack``."""
        ...

    def pack(self) -> None:
        """Turn loaded weights into the form they are computed with. Called once."""
        ...
