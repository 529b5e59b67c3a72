"""What goes into a step, in which order, and what absorbing it does."""

from __future__ import annotations

from tests.support.engines import Bench
from tests.support.fake_runner import generate
from worker.plan import RowKind
from worker.sequence import NO_ROW, SequenceState


def numbers(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once():
    bench = Bench(step_tokens=8)
    bench.add("a", numbers(20))
    taken = [bench.step() for _ in range(4)]
    assert taken == [
        [("a", "extend", 8)],
        [("a", "extend", 8)],
        [("a", "extend", 4)],
        [("a", "decode", 1)],
    ]
    assert bench.outputs["a"] == generate(numbers(20), 2)


def test_the_plan_of_a_chunk():
    bench = Bench(step_tokens=8)
    sequence = bench.add("a", numbers(12))
    first = bench.scheduler.next_plan(0.0)
    assert first is not None
    assert first.plan.samples == ()
    bench.absorb(first)
    assert bench.scheduler.uncomputed_tokens == 4
    second = bench.scheduler.next_plan(0.0)
    assert second is not None
    plan = second.plan
    assert plan.kinds == (RowKind.EXTEND,)
    assert plan.rows == (sequence.row,)
    assert plan.query_start == (0, 4)
    assert plan.kv_lens == (12,)
    assert plan.token_ids.tolist() == [9, 10, 11, 12]
    assert [(s.index, s.position, s.params) for s in plan.samples] == [(0, 0, sequence.params)]
    assert plan.tokens == 4


def test_decode_rows_come_first_and_prompt_chunks_fill_the_budget():
    bench = Bench(step_tokens=8)
    bench.add("a", numbers(3))
    bench.step()
    bench.add("b", numbers(20, 30))
    assert bench.step() == [("a", "decode", 1), ("b", "extend", 7)]
    bench.run()
    assert bench.outputs["a"] == generate(numbers(3), 8)
    assert bench.outputs["b"] == generate(numbers(20, 30), 8)


def test_started_prompts_go_before_new_ones():
    bench = Bench(step_tokens=8)
    bench.add("a", numbers(12))
    bench.add("b", numbers(5, 30))
    assert bench.step() == [("a", "extend", 8)]
    assert bench.step() == [("a", "extend", 4), ("b", "extend", 4)]
    assert bench.step() == [("a", "decode", 1), ("b", "decode", 1)]


def test_what_cannot_be_computed_now_takes_no_pages_yet():
    bench = Bench(step_tokens=8)
    bench.add("a", numbers(20))
    waits = bench.add("b", numbers(5, 30))
    for _ in range(2):
        assert bench.step() == [("a", "extend", 8)]
        assert waits.state is SequenceState.WAITING
        assert waits.row == NO_ROW


def test_the_last_prompt_token_alone_is_a_decode_row():
    """One token to compute is the same work whether it was sampled or given."""
    bench = Bench(step_tokens=8)
    bench.add("a", numbers(9))
    bench.step()
    assert bench.step() == [("a", "decode", 1)]
    assert bench.outputs["a"] == generate(numbers(9), 1)


def test_sequences_run_in_the_order_of_arrival_up_to_the_limit():
    bench = Bench(step_tokens=100, max_running=2)
    for n, rid in enumerate("abcd"):
        bench.add(rid, numbers(3, 10 * n), max_new=2)
    assert [row[0] for row in bench.step()] == ["a", "b"]
    assert [row[0] for row in bench.step()] == ["a", "b"]
    assert [row[0] for row in bench.step()] == ["c", "d"]


def test_a_prompt_starts_only_when_decode_rows_leave_budget():
    bench = Bench(step_tokens=2)
    bench.add("a", [1], max_new=3)
    bench.add("b", [2], max_new=3)
    bench.add("c", [3, 4], max_new=1)
    steps = [[rid for rid, _, _ in bench.step()] for _ in range(4)]
    assert steps == [["a", "b"], ["a", "b"], ["a", "b"], ["c"]]


def test_without_work_there_is_no_plan():
    bench = Bench()
    assert bench.scheduler.next_plan(0.0) is None
    assert bench.scheduler.idle
    bench.add("a", [1])
    assert not bench.scheduler.idle


def test_a_result_that_comes_after_its_sequence_left_is_dropped():
    bench = Bench()
    gone, stays = bench.add("a", [1, 2, 3]), bench.add("b", [4, 5, 6])
    step = bench.scheduler.next_plan(0.0)
    assert step is not None
    bench.scheduler.retract(gone)
    progress = bench.absorb(step)
    assert [p.sequence for p in progress] == [stays]
    assert progress[0].token == generate([4, 5, 6], 1)[0]
    assert (gone.length, gone.computed_len) == (3, 0)
    bench.scheduler.cache.check()
    bench.run()
    assert bench.outputs["a"] == generate([1, 2, 3], 8)


def test_removing_takes_a_sequence_from_the_queue_or_the_running_set():
    bench = Bench(max_running=1)
    running, waiting = bench.add("a", [1, 2]), bench.add("b", [3, 4])
    bench.step()
    bench.scheduler.remove(waiting)
    bench.scheduler.remove(running)
    assert bench.scheduler.idle
