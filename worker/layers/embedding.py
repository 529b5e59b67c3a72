"""Token embedding and LM head, tied or not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from worker.layers.linear import Linear
from worker.layers.norm import Normed
from worker.layers.parameter import Slot, Slots


class Embedding:
    """Token id -> hidden state."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype) -> None:
        self.weight = torch.empty(vocab, hidden, dtype=dtype)

    def slots(self, prefix: str) -> Slots:
        yield f"{prefix}weight", Slot(self.weight)

    def __call__(self, token_ids: Int64[Tensor, "T"]) -> Float[Tensor, "T hidden"]:
        return F.embedding(token_ids, self.weight)


class LmHead:
    """Hidden state -> fp32 logits.

    Rounded to bf16's 8 bits, the two best logits of a step would often tie. A tied head shares the
    embedding's weight until it is packed.
    """

    def __init__(self, embedding: Embedding, *, tied: bool) -> None:
        vocab, hidden = embedding.weight.shape
        self._linear = (
            Linear.over(embedding.weight, wide=True)
            if tied
            else Linear(hidden, {"lm_head": vocab}, embedding.weight.dtype, wide=True)
        )

    def slots(self) -> Slots:
        """Empty where the head is tied."""
        yield from self._linear.slots("")

    def pack(self) -> None:
        self._linear.pack()

    def __call__(self, x: Float[Tensor, "L hidden"] | Normed) -> Float[Tensor, "L vocab"]:
        return self._linear(x)
