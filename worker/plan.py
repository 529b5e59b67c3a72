"""StepPlan and StepResult: what the scheduler says and hears. Host numpy arrays, no tensors.

A plan is all that a rank needs to run a step, scheduler or not: a follower of a tensor-parallel
group gets the same plan as its leader.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from core.wire import Int32Array, SamplingParams, TokenLogprob


class RowKind(StrEnum):
    """What one sequence does in a step. A plan without rows is an idle step."""

    EXTEND = "extend"  # prompt tokens, or the rest of a retracted sequence
    DECODE = "decode"  # the one token sampled last


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sequence of a step whose next token is wanted."""

    index: int  # which row of the plan
    position: int  # of the new token in the request's output: keys the sampling noise
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over ``B`` sequences and ``T`` tokens; prefill chunks and decode rows mix."""

    kinds: tuple[RowKind, ...]  # B
    rows: tuple[int, ...]  # B, in the request table
    query_start: tuple[int, ...]  # B + 1, into the token arrays
    kv_lens: tuple[int, ...]  # B, KV length after this step's writes
    token_ids: Int32Array  # [T]
    samples: tuple[SampleRow, ...]

    @property
    def tokens(self) -> int:
        return self.query_start[-1]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, on the host. As long as the plan's ``samples``."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]


Ticket = TypeVar("Ticket")


class Runner(Protocol[Ticket]):
    """Runs plans: in two halves, so that a caller may prepare the next step meanwhile.

    The rows and pages of a launched plan stay untouched until its ticket is collected.
    """

    def launch(self, plan: StepPlan) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...
