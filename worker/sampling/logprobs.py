"""Log-probabilities of chosen and of the most likely tokens, under the model's own distribution."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from core.wire import TokenLogprob, TopLogprob
from worker.plan import SampleRow, ScoreRow


def logprobs(
    logits: Float[Tensor, "L vocab"], tokens: Int64[Tensor, "L"], rows: tuple[SampleRow, ...]
) -> tuple[TokenLogprob | None, ...]:
    """One entry per row; None where the request did not ask."""
    return tuple(
        _one(logits[i], int(tokens[i]), row.params.top_logprobs) if row.params.logprobs else None
        for i, row in enumerate(rows)
    )


def score(
    logits: Float[Tensor, "targets vocab"], rows: tuple[ScoreRow, ...]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Log-probabilities of known prompt tokens, row by row."""
    out, start = [], 0
    for row in rows:
        part = logits[start : start + len(row.targets)]
        out.append(_known(part, torch.from_numpy(row.targets.astype(np.int64)), row.top))
        start += len(row.targets)
    return tuple(out)


def _known(
    logits: Float[Tensor, "n vocab"], targets: Int64[Tensor, "n"], top: int
) -> tuple[TokenLogprob, ...]:
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    own = (logits.gather(1, targets.unsqueeze(1)) - total).squeeze(1).tolist()
    values, ids = torch.topk(logits, top)
    best = zip(ids.tolist(), (values - total).tolist(), strict=True)
    return tuple(
        TokenLogprob(logprob=logprob, top=_alternatives(*pair))
        for logprob, pair in zip(own, best, strict=True)
    )


def _alternatives(ids: list[int], logprobs: list[float]) -> tuple[TopLogprob, ...]:
    pairs = zip(ids, logprobs, strict=True)
    return tuple(TopLogprob(token_id=i, logprob=v) for i, v in pairs)


def _one(logits: Float[Tensor, "vocab"], token: int, top: int) -> TokenLogprob:
    total = torch.logsumexp(logits, dim=-1)
    best: tuple[TopLogprob, ...] = ()
    if top:
        values, ids = torch.topk(logits, top)
        best = _alternatives(ids.tolist(), (values - total).tolist())
    return TokenLogprob(logprob=float(logits[token] - total), top=best)
