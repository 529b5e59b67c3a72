"""ModelRunner: ``launch(plan) -> Ticket``, ``collect(ticket) -> StepResult``.

Two halves, so that a caller may prepare the next step while this one runs on a device. On a CPU
the work is done when ``launch`` returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from core.wire import TokenLogprob
from worker.cache.kv_pool import KVPool
from worker.cache.request_table import RequestTable
from worker.models.base import Model
from worker.pack import pack
from worker.plan import StepPlan, StepResult
from worker.sampling.adjust import adjust
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
    """Packs, runs the model, samples, copies back."""

    def __init__(
        self, model: Model, pool: KVPool, table: RequestTable, eos: frozenset[int] = frozenset()
    ) -> None:
        self._model = model
        self._eos = eos
        self._pool = pool
        self._table = torch.from_numpy(table.slots)  # the same memory

    def launch(self, plan: StepPlan) -> Ticket:
        with torch.inference_mode():
            logits = self._model.forward(pack(plan, self._table), self._pool)
            wanted, scored = logits[: len(plan.samples)], logits[len(plan.samples) :]
            tokens = sample(adjust(wanted, plan.samples, self._eos), plan.samples)
            # Prompt scores are reduced here: their logits are too large to keep.
            return Ticket(plan, wanted, tokens, score(scored, plan.scores))

    def collect(self, ticket: Ticket) -> StepResult:
        with torch.inference_mode():
            chosen = logprobs(ticket.logits, ticket.tokens, ticket.plan.samples)
        return StepResult(tuple(ticket.tokens.tolist()), chosen, ticket.scores)
