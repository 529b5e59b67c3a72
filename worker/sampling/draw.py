"""One row's token in plain torch: the specification of worker/kernels/sampling.cpp.

A token's *distance* is (best logit - its logit) / temperature; exp(-distance) is its probability
but for a factor. min-p, top-k and top-p are limits on the distance. Among those within, token ``n``
finishes a race at the time E[n] / exp(-distance), E being independent exponential numbers made
from (seed, output position, n); the first one is each token with just its probability.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from core.wire import SamplingParams
from worker.plan import SampleRow
from worker.sampling.noise import uniform

COLDEST = 1e-30  # a float32 holds it, and any two logits that differ are far apart
SHORTLIST = 1024  # a nucleus nearly always fits in so many tokens; else the row is sorted whole


def draw(logits: Float[Tensor, "vocab"], row: SampleRow) -> Int64[Tensor, ""]:
    """The token of a row with a temperature. Broken logits give the place of the break."""
    best = logits.argmax()
    if not bool(logits[best].isfinite()):
        return best
    # A tensor: torch may multiply by the inverse of a plain number, which is not the same.
    temperature = logits.new_tensor(max(row.params.temperature, COLDEST))
    distance = (logits[best] - logits) / temperature
    numbers = uniform(row.params.seed, row.position, len(logits), logits.device)
    log_times = torch.log1p(-numbers).neg_().log_().add_(distance)
    beyond = distance > limit(distance, row.params)
    return log_times.masked_fill_(beyond, torch.inf).argmin()


def limit(distance: Float[Tensor, "vocab"], params: SamplingParams) -> Float[Tensor, ""]:
    """The largest distance that min-p, top-k and top-p leave, one after the other.

    Ties with the last token stay in. The nucleus is the smallest set of most likely tokens whose
    probability, renormalised over what min-p and top-k leave, reaches ``top_p``.
    """
    last = distance.new_tensor(-math.log(params.min_p) if params.min_p > 0 else math.inf)
    if 0 < params.top_k < len(distance):
        nearest = torch.topk(distance, params.top_k, largest=False).values
        last = torch.minimum(last, nearest[-1])
    if params.top_p < 1:
        last = _nucleus(distance[distance <= last], params.top_p)
    return last


def _nucleus(distance: Float[Tensor, "n"], top_p: float) -> Float[Tensor, ""]:
    """The distance of the nucleus's last token."""
    target = top_p * (-distance).exp().sum()
    nearest = torch.topk(distance, min(SHORTLIST, len(distance)), largest=False).values
    mass = (-nearest).exp().cumsum(dim=-1)
    if mass[-1] < target and len(nearest) < len(distance):
        nearest = distance.sort().values
        mass = (-nearest).exp().cumsum(dim=-1)
    before = int((mass < target).sum())
    return nearest[min(before, len(nearest) - 1)]
