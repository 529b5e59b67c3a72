"""Changes to logits before sampling: bias, penalties, a minimum length.

Penalties as in the CTRL paper (repetition: Keskar et al., 2019) and the OpenAI API (presence and
frequency). Log-probabilities are taken before any of this.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from core.wire import Int32Array, SamplingParams
from worker.plan import SampleRow


def adjust(
    logits: Float[Tensor, "L vocab"], rows: tuple[SampleRow, ...], eos: frozenset[int]
) -> Float[Tensor, "L vocab"]:
    """The same tensor where no row asks for a change, else a changed copy."""
    wanting = [i for i, row in enumerate(rows) if _wants(row)]
    if not wanting:
        return logits
    out = logits.clone()
    for i in wanting:
        _change(out[i], rows[i], eos)
    return out


def _wants(row: SampleRow) -> bool:
    return bool(row.params.logit_bias) or penalises(row.params) or _too_short(row)


def penalises(params: SamplingParams) -> bool:
    """Whether the tokens so far count."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def _too_short(row: SampleRow) -> bool:
    return row.position < row.params.min_new_tokens


def _change(logits: Float[Tensor, "vocab"], row: SampleRow, eos: frozenset[int]) -> None:
    """One row, in place."""
    params = row.params
    if params.logit_bias:
        biased, amounts = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, torch.tensor(biased), torch.tensor(amounts, dtype=logits.dtype))
    if params.repetition_penalty != 1:
        _penalise_repetition(logits, row, params.repetition_penalty)
    if len(row.output) and (params.presence_penalty or params.frequency_penalty):
        ids, counts = _unique(row.output)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if _too_short(row) and (ends := [*eos, *params.stop_token_ids]):
        logits[torch.tensor(ends)] = -torch.inf


def _penalise_repetition(logits: Float[Tensor, "vocab"], row: SampleRow, penalty: float) -> None:
    ids, _ = _unique(np.concatenate([row.prompt, row.output]))
    seen = logits[ids]
    logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _unique(ids: Int32Array) -> tuple[Tensor, Tensor]:
    """Distinct ids [n] as int64, and how often each occurs [n] as float32."""
    distinct, counts = np.unique(ids, return_counts=True)
    return torch.from_numpy(distinct.astype(np.int64)), torch.from_numpy(counts.astype(np.float32))
