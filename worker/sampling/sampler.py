"""Logits -> token ids: greedy, temperature, min-p, top-k, top-p, seeded.

Sampling is a pure function of the logits and of (seed, output position, token id): the noise comes
from a counter-based generator keyed by seed and position, whose n-th number belongs to token n.
So batching, retraction and migration do not change a seeded answer.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from worker.kernels import ops
from worker.kernels.load import suits
from worker.plan import SampleRow
from worker.sampling.draw import draw


def sample(logits: Float[Tensor, "L vocab"], rows: tuple[SampleRow, ...]) -> Int64[Tensor, "L"]:
    """One token per row."""
    if not any(row.params.temperature > 0 for row in rows):
        return ops.argmax(logits)
    if suits(logits) and logits.dtype == torch.float32:
        tokens: Tensor = torch.ops.antiphon.sample(logits, *arguments(rows))[0]
        return tokens
    tokens = ops.argmax(logits)
    for index, row in enumerate(rows):
        if row.params.temperature > 0:
            tokens[index] = draw(logits[index], row)
    return tokens


def arguments(
    rows: tuple[SampleRow, ...],
) -> tuple[Float[Tensor, "L 3"], Int64[Tensor, "L 3"]]:
    """What the kernel wants: (temperature, min_p, top_p) and (top_k, seed, position)."""
    params = [row.params for row in rows]
    shares = [(p.temperature, p.min_p, p.top_p) for p in params]
    numbers = [
        (p.top_k, _signed(p.seed), row.position) for p, row in zip(params, rows, strict=True)
    ]
    return torch.tensor(shares, dtype=torch.float64), torch.tensor(numbers, dtype=torch.int64)


def _signed(seed: int) -> int:
    """The same 64 bits as an int64."""
    return (seed + 2**63) % 2**64 - 2**63
