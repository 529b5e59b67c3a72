"""StepPlan and StepResult: what the scheduler says and hears. Host numpy arrays, no tensors.

A plan is all that a rank needs to run a step, scheduler or not: a follower of a tensor-parallel
group gets the same plan as its leader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar

import numpy as np

from core.wire import Int32Array, SamplingParams, TokenLogprob
from worker.cache.copies import SlotCopy


class RowKind(StrEnum):
    """What one sequence does in a step. A plan without rows is an idle step."""

    EXTEND = "extend"  # prompt tokens, or the rest of a retracted sequence
    DECODE = "decode"  # the one token sampled last


def _none() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sequence of a step whose next token is wanted."""

    index: int  # which row of the plan
    position: int  # of the new token in the request's output: keys the sampling noise
    params: SamplingParams
    prompt: Int32Array = field(default_factory=_none)  # ids so far, for penalties
    output: Int32Array = field(default_factory=_none)  # but for one that is late


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One sequence of a step whose prompt tokens are to be scored.

    ``targets[j]`` is the prompt token that follows the row's ``j``-th token of this step.
    """

    index: int  # which row of the plan
    targets: Int32Array
    top: int  # alternatives for each


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over ``B`` sequences and ``T`` tokens; prefill chunks and decode rows mix.

    There may be none of both, when the step only copies.
    """

    kinds: tuple[RowKind, ...]  # B
    rows: tuple[int, ...]  # B, in the request table
    query_start: tuple[int, ...]  # B + 1, into the token arrays
    kv_lens: tuple[int, ...]  # B, KV length after this step's writes
    token_ids: Int32Array  # [T]
    samples: tuple[SampleRow, ...]
    scores: tuple[ScoreRow, ...] = ()
    # Rows of one token each, still being sampled when the plan was made: the latest sample of the
    # same row of the request table. ``token_ids`` has -1 there.
    late: tuple[int, ...] = ()
    copies: tuple[SlotCopy, ...] = ()  # done before anything is computed

    @property
    def tokens(self) -> int:
        return self.query_start[-1]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, on the host: as long as the plan's ``samples`` and ``scores``."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    scores: tuple[tuple[TokenLogprob, ...], ...] = ()


Ticket = TypeVar("Ticket")


class Runner(Protocol[Ticket]):
    """Runs plans: in two halves, so that a caller may prepare the next step meanwhile.

    What a plan copies is copied first, and may be all it does.
    Plans run in the order of their launches, and are collected in it. The pages of a launched plan
    stay its sequences' until its ticket is collected, and so do the rows; a page that the prefix
    cache had already may replace one of equal content in a row.
    """

    def launch(self, plan: StepPlan) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...
