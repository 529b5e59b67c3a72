"""ModelRunner: ``launch(plan) -> Ticket``, ``collect(ticket) -> StepResult``.

Two halves, so that a caller may prepare the next step while this one runs on a device. On a CPU
the work is done when ``launch`` returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from core.wire import TokenLogprob
from worker.cache.copies import SlotCopy
from worker.cache.kv_pool import KVPool
from worker.cache.request_table import RequestTable
from worker.models.base import Model
from worker.pack import pack
from worker.plan import SampleRow, StepPlan, StepResult
from worker.sampling.adjust import adjust, penalises
from worker.sampling.logprobs import logprobs, score
from worker.sampling.sampler import sample


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step. Its rows and pages stay untouched until it is collected."""

    plan: StepPlan
    logits: Float[Tensor, "L vocab"]
    tokens: Int64[Tensor, "L"]
    scores: tuple[tuple[TokenLogprob, ...], ...]


class ModelRunner:
    """Copies what is due, packs, runs the model, samples, copies back.

    ``_last`` has the token sampled last for each row of the request table: a plan that was made
    before that token was known finds it there.
    """

    def __init__(
        self, model: Model, pool: KVPool, table: RequestTable, eos: frozenset[int] = frozenset()
    ) -> None:
        self._model = model
        self._eos = eos
        self._pool = pool
        self._table = torch.from_numpy(table.slots)  # the same memory
        self._last = torch.full((table.rows,), -1, dtype=torch.int64)

    def launch(self, plan: StepPlan) -> Ticket:
        with torch.inference_mode():
            if plan.copies:
                self._pool.copy(*_slots(plan.copies))
            if not plan.rows:
                return Ticket(plan, torch.empty(0, 0), torch.empty(0, dtype=torch.int64), ())
            packed = pack(plan, self._table)
            samples = self._bind(plan, packed.token_ids)
            logits = self._model.forward(packed, self._pool)
            wanted, scored = logits[: len(samples)], logits[len(samples) :]
            tokens = sample(adjust(wanted, samples, self._eos), samples)
            self._last[[plan.rows[row.index] for row in samples]] = tokens
            # Prompt scores are reduced here: their logits are too large to keep.
            return Ticket(plan, wanted, tokens, score(scored, plan.scores))

    def _bind(self, plan: StepPlan, token_ids: Int64[Tensor, "T"]) -> tuple[SampleRow, ...]:
        """Fill in, in place, the late tokens; the plan's sample rows with them in the outputs."""
        if not plan.late:
            return plan.samples
        late = self._last[[plan.rows[index] for index in plan.late]]
        token_ids[[plan.query_start[index] for index in plan.late]] = late
        known = dict(zip(plan.late, late.numpy().astype(np.int32), strict=True))
        return tuple(
            replace(row, output=np.append(row.output, known[row.index]))
            if row.index in known and penalises(row.params)
            else row
            for row in plan.samples
        )

    def collect(self, ticket: Ticket) -> StepResult:
        with torch.inference_mode():
            chosen = logprobs(ticket.logits, ticket.tokens, ticket.plan.samples)
        return StepResult(tuple(ticket.tokens.tolist()), chosen, ticket.scores)


def _slots(copies: tuple[SlotCopy, ...]) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "n"]]:
    """Sources and targets of several copies, which touch different slots."""
    source = np.concatenate([copy.source for copy in copies]).astype(np.int64)
    target = np.concatenate([copy.target for copy in copies]).astype(np.int64)
    return torch.from_numpy(source), torch.from_numpy(target)
