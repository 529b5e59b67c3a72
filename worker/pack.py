"""StepPlan -> ForwardInput: the tensors that a forward pass needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor

from worker.plan import StepPlan


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step. Sequence ``b`` owns tokens ``query_start[b]:query_start[b+1]`` of the step.

    Its KV after this step is ``slots[b][:kv_lens[b]]``: cached and earlier tokens first, then the
    tokens of this step, in order of position. So the new tokens of ``b`` sit at positions
    ``kv_lens[b] - query_len[b] .. kv_lens[b] - 1`` and are written to ``write_slots`` before
    anything attends to them.
    """

    token_ids: Int64[Tensor, "T"]
    positions: Int64[Tensor, "T"]
    write_slots: Int64[Tensor, "T"]
    query_start: tuple[int, ...]  # B + 1
    kv_lens: tuple[int, ...]  # B
    slots: tuple[Int64[Tensor, "_"], ...]  # B; each of length kv_lens[b]
    logit_rows: Int64[Tensor, "L"]  # which of the T tokens need logits


def pack(plan: StepPlan, table: Int64[Tensor, "rows width"]) -> ForwardInput:
    """Make the tensors of one step. ``table`` shares memory with the request table.

    Logits come in the order of ``plan.samples``, then ``plan.scores``, target by target.

    The slots of a sequence are views of its row, so the row must not change while the step runs.
    """
    spans = list(zip(plan.rows, plan.query_start, plan.query_start[1:], plan.kv_lens, strict=False))
    write_slots = [table[row, kv - (end - start) : kv] for row, start, end, kv in spans]
    positions = [torch.arange(kv - (end - start), kv) for _, start, end, kv in spans]
    return ForwardInput(
        token_ids=torch.from_numpy(plan.token_ids.astype(np.int64)),
        positions=torch.cat(positions),
        write_slots=torch.cat(write_slots),
        query_start=plan.query_start,
        kv_lens=plan.kv_lens,
        slots=tuple(table[row, :kv] for row, _, _, kv in spans),
        logit_rows=torch.from_numpy(_logit_rows(plan)),
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """A step in which only those tokens ask whose results are read after the last layer."""

    step: ForwardInput  # sequences have queries for these tokens alone; all KV is written
    asking: Int64[Tensor, "A"]  # which of the T tokens they are
    logit_rows: Int64[Tensor, "L"]  # which of the A


def ends_only(step: ForwardInput) -> Ends | None:
    """What a last layer has to do: nobody reads its results for a prompt but for the last token.

    A sequence asks with its last token, with none, or with all where others are wanted as well
    (prompt scores): that depends on nothing but itself. None where all tokens ask.
    """
    rows = step.logit_rows.tolist()
    wanted, asking = set(rows), list[int]()
    members, starts = [], [0]
    for b, (start, stop) in enumerate(pairwise(step.query_start)):
        tokens = [token for token in range(start, stop) if token in wanted]
        if tokens:
            asking += tokens if tokens == [stop - 1] else range(start, stop)
            members.append(b)
            starts.append(len(asking))
    if len(asking) == len(step.token_ids):
        return None
    place = {token: row for row, token in enumerate(asking)}
    narrow = replace(
        step,
        query_start=tuple(starts),
        kv_lens=tuple(step.kv_lens[b] for b in members),
        slots=tuple(step.slots[b] for b in members),
    )
    return Ends(
        narrow,
        torch.tensor(asking, dtype=torch.int64),
        torch.tensor([place[row] for row in rows], dtype=torch.int64),
    )


def _logit_rows(plan: StepPlan) -> npt.NDArray[np.int64]:
    last = [plan.query_start[sample.index + 1] - 1 for sample in plan.samples]
    scored = [plan.query_start[row.index] + np.arange(len(row.targets)) for row in plan.scores]
    return np.concatenate([np.asarray(last, np.int64), *scored]).astype(np.int64)
