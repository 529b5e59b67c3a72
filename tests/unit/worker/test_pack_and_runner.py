"""From a plan to tensors, through a model that only looks, to tokens on the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from core.wire import SamplingParams
from tests.support.specs import dense
from worker.cache.copies import SlotCopy
from worker.cache.kv_pool import KVPool
from worker.cache.request_table import RequestTable
from worker.pack import ForwardInput, ends_only, pack
from worker.plan import RowKind, SampleRow, StepPlan
from worker.runner import ModelRunner

VOCAB = 20
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)
LOGPROBS = SamplingParams(max_new_tokens=4, temperature=0.0, logprobs=True, top_logprobs=2)


@pytest.fixture
def table():
    table = RequestTable(3, 8)
    table.write(2, 0, np.array([5, 6, 7, 8], np.int32))  # a chunk: two cached, two new
    table.write(0, 0, np.array([9, 3, 1], np.int32))  # a decode row
    return table


@pytest.fixture
def plan():
    return StepPlan(
        kinds=(RowKind.EXTEND, RowKind.DECODE),
        rows=(2, 0),
        query_start=(0, 2, 3),
        kv_lens=(4, 3),
        token_ids=np.array([11, 12, 13], np.int32),
        samples=(SampleRow(0, 0, GREEDY), SampleRow(1, 5, LOGPROBS)),
    )


class Looker:
    """Implements Model: the logits of a token point at the token after it."""

    spec = dense()

    def __init__(self) -> None:
        self.seen: list[ForwardInput] = []

    def forward(self, step: ForwardInput, pool: KVPool) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        self.seen.append(step)
        after = step.token_ids[step.logit_rows] + 1
        return torch.nn.functional.one_hot(after, VOCAB).float()

    def slots(self) -> dict:
        raise AssertionError("nothing is loaded")

    def pack(self) -> None:
        raise AssertionError("nothing is packed")


def test_the_tensors_of_a_mixed_step(table, plan):
    step = pack(plan, torch.from_numpy(table.slots))
    assert step.token_ids.tolist() == [11, 12, 13]
    assert step.positions.tolist() == [2, 3, 2]
    assert step.write_slots.tolist() == [7, 8, 1]
    assert step.query_start == (0, 2, 3)
    assert step.kv_lens == (4, 3)
    assert [slots.tolist() for slots in step.slots] == [[5, 6, 7, 8], [9, 3, 1]]
    assert step.logit_rows.tolist() == [1, 2]
    assert {t.dtype for t in (step.token_ids, step.positions, step.write_slots)} == {torch.int64}


def test_rows_that_want_no_token_have_no_logits(table, plan):
    chunk = StepPlan(
        kinds=plan.kinds,
        rows=plan.rows,
        query_start=plan.query_start,
        kv_lens=plan.kv_lens,
        token_ids=plan.token_ids,
        samples=(plan.samples[1],),
    )
    assert pack(chunk, torch.from_numpy(table.slots)).logit_rows.tolist() == [2]


def test_a_step_gives_tokens_and_the_log_probabilities_that_were_asked_for(table, plan):
    model = Looker()
    runner = ModelRunner(model, KVPool(dense(), 10, torch.float32), table)
    result = runner.collect(runner.launch(plan))
    assert result.token_ids == (13, 14)
    assert result.logprobs[0] is None
    assert result.logprobs[1].top[0].token_id == 14
    assert result.logprobs[1].logprob == pytest.approx(1 - np.log(np.e + VOCAB - 1), abs=1e-5)


def asked(starts: tuple[int, ...], rows: list[int]) -> ForwardInput:
    """A step whose sequence ``b`` has the slots 10 b, 10 b + 1, .."""
    lens = [stop - start for start, stop in pairwise(starts)]
    tokens = torch.arange(starts[-1])
    slots = tuple(torch.arange(10 * b, 10 * b + n + 1) for b, n in enumerate(lens))
    return ForwardInput(
        tokens, tokens, tokens, starts, tuple(n + 1 for n in lens), slots, torch.tensor(rows).long()
    )


def test_a_last_layer_is_asked_by_the_last_tokens_alone():
    step = asked((0, 4, 5, 9, 9, 12), [11, 4, 3])  # the third wants nothing, the fourth has nothing
    ends = ends_only(step)
    assert ends is not None
    assert ends.asking.tolist() == [3, 4, 11]
    assert ends.logit_rows.tolist() == [2, 1, 0]
    assert ends.step.query_start == (0, 1, 2, 3)
    assert ends.step.kv_lens == (5, 2, 4)
    assert [int(slots[0]) for slots in ends.step.slots] == [0, 10, 40]
    assert ends.step.write_slots is step.write_slots


def test_a_sequence_that_wants_more_asks_with_all_its_tokens_whatever_the_others_do():
    ends = ends_only(asked((0, 4, 8), [1, 7]))
    assert ends is not None
    assert ends.asking.tolist() == [0, 1, 2, 3, 7]
    assert ends.logit_rows.tolist() == [1, 4]
    assert ends.step.query_start == (0, 4, 5)


def test_nothing_is_narrower_where_all_ask():
    assert ends_only(asked((0, 1, 2, 3), [0, 1, 2])) is None
    assert ends_only(asked((0, 1, 4), [0, 1, 2, 3])) is None


def test_the_runner_reads_the_request_table_as_it_is_at_launch(table, plan):
    model = Looker()
    runner = ModelRunner(model, KVPool(dense(), 10, torch.float32), table)
    table.write(0, 0, np.array([4, 4, 2], np.int32))
    runner.launch(plan)
    assert model.seen[0].slots[1].tolist() == [4, 4, 2]


def test_a_late_token_is_the_one_that_its_row_sampled_last(table, plan):
    model = Looker()
    runner = ModelRunner(model, KVPool(dense(), 10, torch.float32), table)
    first = runner.launch(plan)  # row 2 samples 13, row 0 samples 14
    penalised = SamplingParams(
        max_new_tokens=4, temperature=0.0, presence_penalty=2.0, logit_bias=((13, 1.5),)
    )
    known = np.array([14], np.int32)
    late = StepPlan(
        kinds=(RowKind.DECODE, RowKind.EXTEND, RowKind.DECODE),
        rows=(0, 1, 2),
        query_start=(0, 1, 3, 4),
        kv_lens=(4, 2, 5),
        token_ids=np.array([-1, 3, 4, -1], np.int32),
        samples=(SampleRow(0, 6, GREEDY), SampleRow(2, 1, penalised, output=known)),
        late=(0, 2),
    )
    second = runner.launch(late)
    assert model.seen[1].token_ids.tolist() == [14, 3, 4, 13]
    assert late.token_ids.tolist() == [-1, 3, 4, -1], "a plan is not changed"
    assert runner.collect(first).token_ids == (13, 14)
    # The penalty takes 14, which the plan knew, and 13, which it did not.
    assert runner.collect(second).token_ids == (15, 0)


class Reader(Looker):
    """Keeps what it finds in the pool when a step begins."""

    def forward(self, step: ForwardInput, pool: KVPool) -> torch.Tensor:
        self.found = pool.k[1][:, 0, 0].tolist()
        return super().forward(step, pool)


def filled() -> KVPool:
    pool = KVPool(dense(), 10, torch.float32)
    for tensor in pool.k + pool.v:
        tensor.copy_(torch.arange(10.0).view(10, 1, 1).expand_as(tensor))
    return pool


def copies(*pairs: tuple[list[int], list[int]]) -> tuple[SlotCopy, ...]:
    return tuple(SlotCopy(np.array(a, np.int32), np.array(b, np.int32)) for a, b in pairs)


def test_a_step_copies_before_it_computes(table, plan):
    model = Reader()
    wanted = copies(([2, 4], [0, 1]), ([2], [9]))
    ModelRunner(model, filled(), table).launch(replace(plan, copies=wanted))
    assert model.found == [2, 4, 2, 3, 4, 5, 6, 7, 8, 2]


def test_a_step_that_only_copies_runs_no_model(table):
    class Nothing(Looker):
        def forward(self, step: ForwardInput, pool: KVPool) -> torch.Tensor:
            raise AssertionError("nothing is to be computed")

    pool = filled()
    runner = ModelRunner(Nothing(), pool, table)
    none = np.empty(0, np.int32)
    empty = StepPlan((), (), (0,), (), none, (), copies=copies(([2, 4], [0, 1])))
    result = runner.collect(runner.launch(empty))
    assert (result.token_ids, result.logprobs, result.scores) == ((), (), ())
    assert pool.v[0][:3, 0, 0].tolist() == [2, 4, 2]
