"""Logits -> token ids: greedy, temperature, min-p, top-k, top-p, seeded.

Sampling is a pure function of the logits and of (seed, output position, token id): the noise comes
from a counter-based generator keyed by seed and position, whose n-th number belongs to token n.
So batching, retraction and migration do not change a seeded answer.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from worker.kernels import ops
from worker.plan import SampleRow

_COLDEST = 1e-30  # a float32 holds it, and any two scores that differ are far apart
SHORTLIST = 1024  # a nucleus nearly always fits in so many tokens; else the row is sorted whole


def sample(logits: Float[Tensor, "L vocab"], rows: tuple[SampleRow, ...]) -> Int64[Tensor, "L"]:
    """One token per row."""
    tokens = ops.argmax(logits)
    for index, row in enumerate(rows):
        if row.params.temperature > 0:
            tokens[index] = _draw(logits[index], row)
    return tokens


def _draw(logits: Float[Tensor, "vocab"], row: SampleRow) -> Int64[Tensor, ""]:
    """Gumbel-max over the tokens that top-k and top-p leave."""
    # The best score is 0, so that a temperature near 0 becomes greedy instead of infinite.
    scaled = (logits - logits.max()) / max(row.params.temperature, _COLDEST)
    if row.params.min_p > 0:
        scaled = scaled.masked_fill(scaled < math.log(row.params.min_p), -torch.inf)
    scores = _filter(scaled, row.params.top_k, row.params.top_p) + _gumbel(
        row.params.seed, row.position, logits.shape[-1]
    )
    return scores.argmax()


def _filter(scaled: Float[Tensor, "vocab"], top_k: int, top_p: float) -> Float[Tensor, "vocab"]:
    """Scores with everything outside the top k and the nucleus at minus infinity.

    The nucleus is the smallest set of most likely tokens whose probability, renormalised over
    the top k, reaches ``top_p``. Ties with the last token stay in.
    """
    vocab = scaled.shape[-1]
    k = min(top_k, vocab) if top_k > 0 else vocab
    if k == vocab and top_p >= 1:
        return scaled
    floor = scaled.new_tensor(-torch.inf)
    if k < vocab:
        floor = torch.topk(scaled, k).values[-1]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    if top_p < 1:
        floor = _nucleus_floor(scaled, top_p)
    return scaled.masked_fill(scaled < floor, -torch.inf)


def _nucleus_floor(scaled: Float[Tensor, "vocab"], top_p: float) -> Float[Tensor, ""]:
    """The score of the nucleus's last token."""
    total = torch.logsumexp(scaled, dim=-1)
    best = torch.topk(scaled, min(SHORTLIST, scaled.shape[-1])).values
    mass = (best - total).exp().cumsum(dim=-1)
    if mass[-1] < top_p and len(best) < scaled.shape[-1]:
        best = scaled.sort(descending=True).values
        mass = (best - total).exp().cumsum(dim=-1)
    last = int((mass < top_p).sum())
    return best[min(last, len(best) - 1)]


def _gumbel(seed: int, position: int, vocab: int) -> Float[Tensor, "vocab"]:
    """Standard Gumbel noise of (seed, position), one number per token id."""
    generator = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=[0, 0, 0, position]))
    uniform = torch.from_numpy(generator.random(vocab, dtype=np.float32))
    exponential = -torch.log(uniform.clamp_min(torch.finfo(torch.float32).tiny))
    return -torch.log(exponential)  # finite, because uniform is in [0, 1)
