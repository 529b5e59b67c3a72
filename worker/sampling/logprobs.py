"""Log-probabilities of chosen and of the most likely tokens, under the model's own distribution."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from core.wire import TokenLogprob, TopLogprob
from worker.plan import SampleRow


def logprobs(
    logits: Float[Tensor, "L vocab"], tokens: Int64[Tensor, "L"], rows: tuple[SampleRow, ...]
) -> tuple[TokenLogprob | None, ...]:
    """One entry per row; None where the request did not ask."""
    return tuple(
        _one(logits[i], int(tokens[i]), row.params.top_logprobs) if row.params.logprobs else None
        for i, row in enumerate(rows)
    )


def _one(logits: Float[Tensor, "vocab"], token: int, top: int) -> TokenLogprob:
    total = torch.logsumexp(logits, dim=-1)
    best: tuple[TopLogprob, ...] = ()
    if top:
        values, ids = torch.topk(logits, top)
        pairs = zip(ids.tolist(), (values - total).tolist(), strict=True)
        best = tuple(TopLogprob(token_id=i, logprob=v) for i, v in pairs)
    return TokenLogprob(logprob=float(logits[token] - total), top=best)
