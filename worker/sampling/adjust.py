"""Changes to logits before sampling: bias, penalties, a minimum length.

Penalties as in the CTRL paper (repetition: Keskar et al., 2019) and the OpenAI API (presence and
frequency). Log-probabilities are taken before any of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from core.wire import Int32Array, SamplingParams
from worker.plan import SampleRow

Rows = list[tuple[int, SampleRow]]  # with their places in the logits
# (row, token ids of it, one amount for all of them or one for each)
Part = tuple[int, Int32Array | Sequence[int], float | Sequence[float]]
Places = tuple[Int64[Tensor, "n"], Int64[Tensor, "n"]]  # rows and token ids


def adjust(
    logits: Float[Tensor, "L vocab"], rows: tuple[SampleRow, ...], eos: frozenset[int]
) -> Float[Tensor, "L vocab"]:
    """The same tensor where no row asks for a change, else a changed copy.

    Each kind of change is made to all rows at once: calling torch costs more than a row's work.
    """
    wanting = [(index, row) for index, row in enumerate(rows) if _wants(row)]
    if not wanting:
        return logits
    out = logits.clone()
    _add_bias(out, wanting)
    _penalise_repetition(out, wanting)
    _penalise_output(out, wanting)
    _forbid_ends(out, wanting, eos)
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


def _add_bias(logits: Float[Tensor, "L vocab"], rows: Rows) -> None:
    parts: list[Part] = []
    for index, row in rows:
        if row.params.logit_bias:
            ids, amounts = zip(*row.params.logit_bias, strict=True)
            parts.append((index, ids, amounts))
    if parts:
        logits.index_put_(*_spread(parts, logits), accumulate=True)


def _penalise_repetition(logits: Float[Tensor, "L vocab"], rows: Rows) -> None:
    """A token that occurs again gets the same new value again."""
    parts: list[Part] = [
        (index, np.concatenate([row.prompt, row.output]), row.params.repetition_penalty)
        for index, row in rows
        if row.params.repetition_penalty != 1
    ]
    if parts:
        places, penalty = _spread(parts, logits)
        seen = logits[places]
        logits.index_put_(places, torch.where(seen > 0, seen / penalty, seen * penalty))


def _penalise_output(logits: Float[Tensor, "L vocab"], rows: Rows) -> None:
    """Presence once for each token that occurs, frequency each time it occurs."""
    once: list[Part] = [
        (index, row.output, row.params.presence_penalty)
        for index, row in rows
        if row.params.presence_penalty
    ]
    each: list[Part] = [
        (index, row.output, -row.params.frequency_penalty)
        for index, row in rows
        if row.params.frequency_penalty
    ]
    if once:
        places, penalty = _spread(once, logits)
        logits.index_put_(places, logits[places] - penalty)
    if each:
        logits.index_put_(*_spread(each, logits), accumulate=True)


def _forbid_ends(logits: Float[Tensor, "L vocab"], rows: Rows, eos: frozenset[int]) -> None:
    parts: list[Part] = [
        (index, [*eos, *row.params.stop_token_ids], -np.inf)
        for index, row in rows
        if _too_short(row)
    ]
    if parts:
        logits.index_put_(*_spread(parts, logits))


def _spread(
    parts: list[Part], logits: Float[Tensor, "L vocab"]
) -> tuple[Places, Float[Tensor, "n"]]:
    """Where the parts' tokens lie in the logits, and the amount of each."""
    lengths = [len(ids) for _, ids, _ in parts]
    rows = np.repeat([row for row, _, _ in parts], lengths)
    tokens = np.concatenate([np.asarray(ids, np.int64) for _, ids, _ in parts])
    amounts = np.concatenate(
        [
            np.broadcast_to(np.asarray(amount, np.float32), length)
            for (_, _, amount), length in zip(parts, lengths, strict=True)
        ]
    )
    places = torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)
    return places, torch.from_numpy(amounts).to(logits)
