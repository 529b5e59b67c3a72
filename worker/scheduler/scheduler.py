"""Scheduler: what runs next. No tensors, no clock, no I/O.

Continuous batching with chunked prefill: each step takes every decoding sequence, then the next
chunks of started prompts, then new ones, within one token budget. When pages run out the cache is
evicted first; then, of the lowest priority, the sequence that has generated least is retracted: its
KV stays in the cache while it can, and it waits in front of its equals with its output kept.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from core.wire import Int32Array, TokenLogprob
from worker.cache.copies import SlotCopy
from worker.cache.node import EMPTY
from worker.cache.prefix_cache import PrefixCache
from worker.plan import RowKind, SampleRow, ScoreRow, StepPlan, StepResult
from worker.scheduler.admission import Admission, Limits
from worker.scheduler.waiting import ORDERS, WaitingQueue
from worker.sequence import Sequence, SequenceState

log = logging.getLogger(__name__)

UNKNOWN: Int32Array = np.array([-1], dtype=np.int32)  # a token that is still being sampled
UNKNOWN.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's part in a step."""

    sequence: Sequence
    kind: RowKind
    take: int  # tokens computed in this step
    life: int  # the sequence's retractions when it was planned: later ones make the row void


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and whom it serves, in the plan's row order."""

    plan: StepPlan
    batch: tuple[Scheduled, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for one sequence that is still running."""

    sequence: Sequence
    kind: RowKind
    token: int | None  # None: a chunk that was not the prompt's last
    logprob: TokenLogprob | None


class Scheduler:
    """Owns the waiting queue and the running set of one rank.

    ``next_plan`` may be called while one step is in flight, and again after its ``absorb``. A
    sequence whose last token is still being sampled is planned all the same; when it turns out to
    have ended, what the redundant row computed is dropped (one step late, see ``Sequence``).
    """

    def __init__(self, cache: PrefixCache, limits: Limits, schedule: str = "fcfs") -> None:
        """``schedule`` is a name in worker/scheduler/waiting.py."""
        self.cache = cache
        self.limits = limits
        order = ORDERS.load(schedule)(cache.tree, limits.context_len)
        self.waiting = WaitingQueue(order)
        self.running: list[Sequence] = []
        self.retractions = 0
        self.admission = Admission(cache, limits)
        self.first_token_only = False  # set by a role whose sequences leave at their first token

    def add(self, sequence: Sequence) -> None:
        """A new sequence that owns nothing yet."""
        self.waiting.push(sequence)

    def resume(self, sequence: Sequence) -> None:
        """A sequence whose prompt was computed elsewhere and whose pages are here."""
        sequence.move(SequenceState.RUNNING)
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take it out of queue or running set; its pages stay its own."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)

    @property
    def idle(self) -> bool:
        return not self.running and not len(self.waiting)

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens of started sequences that no step has taken yet."""
        return sum(s.remaining for s in self.running if s.remaining > 1)

    def next_plan(self, now: float) -> Step | None:
        """The next step, or None when nothing can run before the step in flight is collected.

        One without rows, when something is to be copied for a sequence that does not run yet.
        ``now``: seconds of a monotonic clock.
        """
        batch = self._decodes()
        if batch is None:
            return self._launched([])
        if batch:
            self.admission.headroom.decoded()
        self.waiting.arrange(now)
        budget = self.limits.step_tokens - len(batch)
        chunks = [s for s in self.running if s.remaining > 1]
        unspoken = budget - sum(s.remaining for s in chunks)
        for sequence in self.admission.admit(self.waiting, self.running, unspoken):
            sequence.move(SequenceState.RUNNING)
            chunks.append(sequence)
        for sequence in chunks:
            take = min(sequence.remaining, budget)
            if take <= 0:
                break
            batch.append(Scheduled(sequence, RowKind.EXTEND, take, sequence.retractions))
            budget -= take
        return self._launched(batch)

    def absorb(self, step: Step, result: StepResult) -> list[Progress]:
        """Book a collected step; may come late. Sequences that left meanwhile are skipped."""
        self.cache.collected()
        sampled = {row.index: i for i, row in enumerate(step.plan.samples)}
        scored = {row.index: i for i, row in enumerate(step.plan.scores)}
        progress: list[Progress] = []
        for index, part in enumerate(step.batch):
            sequence = part.sequence
            if sequence.state is not SequenceState.RUNNING or sequence.retractions != part.life:
                continue
            sequence.computed_len += part.take
            sequence.flying -= part.take
            if (at := scored.get(index)) is not None:
                sequence.prompt_logprobs.extend(result.scores[at])
            token, logprob = None, None
            if (at := sampled.get(index)) is not None:
                token, logprob = result.token_ids[at], result.logprobs[at]
                sequence.append(token)
                sequence.pending -= 1
            if part.kind is RowKind.EXTEND:
                self.cache.commit(sequence)
            progress.append(Progress(sequence, part.kind, token, logprob))
        return progress

    def retract(self, sequence: Sequence) -> None:
        """Take its pages away; later it computes itself again, from the cache where it can."""
        log.info(
            "retracted for lack of pages, with %d tokens computed",
            sequence.computed_len,
            extra={"rid": sequence.rid},
        )
        self.admission.headroom.retracted(self.running)
        self.running.remove(sequence)
        self.cache.release(sequence)
        sequence.retractions += 1
        self.retractions += 1
        sequence.move(SequenceState.WAITING)
        self.waiting.push_front(sequence)

    def _launched(self, batch: list[Scheduled]) -> Step | None:
        """The step of this batch, counted as in flight; None when there is nothing to do."""
        if not batch and not self.cache.copies_due:
            return None
        plan = _plan(batch, self.cache.launched())
        for part in batch:
            part.sequence.flying += part.take
        for sample in plan.samples:
            batch[sample.index].sequence.pending += 1
        return Step(plan, tuple(batch))

    def _decodes(self) -> list[Scheduled] | None:
        """Decoding rows; None when it takes a retraction to serve them, and a step is in flight.

        Pages of a retracted sequence are of no use before that step is collected.
        """
        wanting = [s for s in self.running if s.remaining == 1 and not self._ends(s)]
        if self.cache.in_flight and not all(self._grow(s) for s in wanting):
            return None
        served = [s for s in wanting if self._make_room(s)]
        # Making room for a later one may have retracted an earlier one.
        alive = [s for s in served if s.state is SequenceState.RUNNING]
        return [Scheduled(s, RowKind.DECODE, 1, s.retractions) for s in alive]

    def _ends(self, sequence: Sequence) -> bool:
        """Whether the token in flight is known to be its last here."""
        if not sequence.pending:
            return False
        return (
            self.first_token_only
            or sequence.output_len + sequence.pending >= sequence.params.max_new_tokens
            or sequence.reach >= self.limits.context_len
        )

    def _grow(self, sequence: Sequence) -> bool:
        return self.cache.grow(sequence, len(sequence.tokens) - 1)

    def _make_room(self, sequence: Sequence) -> bool:
        """A page for the next token, retracting others, at last itself."""
        while sequence.state is SequenceState.RUNNING:
            if self._grow(sequence):
                return True
            self.retract(min(self.running, key=_loss))
        return False


def _loss(sequence: Sequence) -> tuple[int, int, int]:
    """What retracting it would cost: smallest is the victim."""
    return sequence.priority, sequence.generated_here, -sequence.length


def _plan(batch: list[Scheduled], copies: tuple[SlotCopy, ...]) -> StepPlan:
    starts = [0]
    pieces, samples, scores, late = [EMPTY], [], [], []
    for index, part in enumerate(batch):
        sequence, done = part.sequence, part.sequence.planned_len
        if done < sequence.length:
            pieces.append(sequence.tokens[done : done + part.take])
        else:
            pieces.append(UNKNOWN)
            late.append(index)
        starts.append(starts[-1] + part.take)
        if done + part.take == sequence.reach:
            samples.append(_sample_row(index, sequence))
        if sequence.unscored and (score := _score_row(index, sequence, part.take)) is not None:
            scores.append(score)
    return StepPlan(
        kinds=tuple(part.kind for part in batch),
        rows=tuple(part.sequence.row for part in batch),
        query_start=tuple(starts),
        kv_lens=tuple(part.sequence.planned_len + part.take for part in batch),
        token_ids=np.concatenate(pieces),
        samples=tuple(samples),
        scores=tuple(scores),
        late=tuple(late),
        copies=copies,
    )


def _sample_row(index: int, sequence: Sequence) -> SampleRow:
    cut = sequence.request.prompt_len
    prompt, output = sequence.ids[:cut], sequence.ids[cut:]
    position = sequence.output_len + sequence.pending
    return SampleRow(index, position, sequence.params, prompt, output)


def _score_row(index: int, sequence: Sequence, take: int) -> ScoreRow | None:
    """The prompt tokens that follow the ones computed in this step; None when there are none."""
    done = sequence.planned_len
    targets = sequence.ids[done + 1 : min(done + take + 1, sequence.request.prompt_len)]
    if not len(targets):
        return None
    return ScoreRow(index, targets, sequence.params.prompt_logprobs or 0)
