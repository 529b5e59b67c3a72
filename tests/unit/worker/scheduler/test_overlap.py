"""A step planned while another one is in flight: late tokens, and who may leave when."""

from __future__ import annotations

import numpy as np

from tests.support.engines import CONTEXT, Bench
from tests.support.fake_runner import generate
from tests.support.requests import request
from worker.cache.prefix_cache import PrefixCache
from worker.plan import RowKind
from worker.scheduler.scheduler import Step
from worker.sequence import NO_ROW, Sequence, SequenceState


def plan(bench: Bench) -> Step:
    step = bench.scheduler.next_plan(0.0)
    assert step is not None
    return step


def leave(bench: Bench, sequence: Sequence) -> None:
    bench.scheduler.remove(sequence)
    bench.scheduler.cache.release(sequence)
    sequence.move(SequenceState.FINISHED)


def test_a_decode_row_is_planned_before_its_token_is_known():
    bench = Bench()
    one = bench.add("a", [1, 2, 3])
    first, second = plan(bench), plan(bench)
    assert (one.flying, one.pending, one.planned_len, one.reach, one.remaining) == (4, 2, 4, 5, 1)
    late = second.plan
    assert late.late == (0,)
    assert late.kinds == (RowKind.DECODE,)
    assert late.token_ids.tolist() == [-1]
    assert late.kv_lens == (4,)
    assert [s.position for s in late.samples] == [1]
    tickets = [bench.runner.launch(first.plan)]
    bench.scheduler.absorb(first, bench.runner.collect(tickets[0]))
    assert (one.length, one.computed_len, one.flying, one.pending) == (4, 3, 1, 1)
    (progress,) = bench.absorb(second)
    assert [*one.ids[3:]] == generate([1, 2, 3], 2)
    assert progress.token == one.ids[-1]
    bench.scheduler.cache.check()


def test_chunks_of_one_prompt_follow_one_another_and_only_the_last_one_samples():
    bench = Bench(step_tokens=4)
    bench.add("a", list(range(10)))
    steps = [plan(bench) for _ in range(3)]
    assert [s.plan.kv_lens for s in steps] == [(4,), (8,), (10,)]
    assert [len(s.plan.samples) for s in steps] == [0, 0, 1]
    assert not any(s.plan.late for s in steps)


def test_scores_are_asked_for_once():
    bench = Bench(step_tokens=3)
    wanted = request("a", [1, 2, 3, 4, 5], 8, prompt_logprobs=0)
    bench.scheduler.add(Sequence.of(wanted, "router", CONTEXT))
    steps = [plan(bench) for _ in range(3)]
    assert [[r.targets.tolist() for r in s.plan.scores] for s in steps] == [[[2, 3, 4]], [[5]], []]


def test_a_token_known_to_be_the_last_one_is_followed_by_nothing():
    bench = Bench()
    bench.add("a", [1, 2, 3], max_new=1)
    full = bench.add("b", list(range(CONTEXT - 1)), max_new=50)
    while not full.pending:
        plan(bench)
    assert full.pending == 1
    assert bench.scheduler.next_plan(0.0) is None


def test_where_sequences_leave_with_their_first_token_there_is_no_second_step():
    bench = Bench()
    bench.scheduler.first_token_only = True
    bench.add("a", [1, 2, 3], max_new=9)
    plan(bench)
    assert bench.scheduler.next_plan(0.0) is None


def test_who_leaves_one_step_late_keeps_row_and_pages_until_that_step_is_collected():
    bench = Bench(pages=20)
    cache = bench.scheduler.cache
    one = bench.add("a", [1, 2, 3])
    first, second = plan(bench), plan(bench)
    bench.absorb(first)
    row, rows = one.row, cache.table.free
    leave(bench, one)  # say, at a stop token
    assert one.row == NO_ROW
    assert (cache.account().cached, cache.account().owned) == (3, 1)
    assert cache.available == 16  # of 20; the prompt is locked, one page is written
    assert cache.table.free == rows
    assert row not in cache.table._free
    assert bench.absorb(second) == []
    assert (cache.account().cached, cache.account().owned) == (3, 0)
    assert cache.tree.peek(np.array([1, 2, 3, *generate([1, 2, 3], 1)], np.int32)) == 3
    assert cache.available == 20
    assert cache.table.free == cache.table.rows
    cache.check()


def test_who_is_aborted_in_flight_gives_back_once():
    bench = Bench(pages=20)
    cache = bench.scheduler.cache
    one, other = bench.add("a", [1, 2, 3]), bench.add("b", [4, 5, 6])
    step = plan(bench)
    leave(bench, one)
    assert cache.account().owned == 6
    assert [p.sequence for p in bench.absorb(step)] == [other]
    assert cache.account().owned == 0
    cache.check()


def test_a_page_that_the_tree_had_twice_is_not_free_before_the_next_step_has_read_it():
    bench = Bench(step_tokens=40)
    cache = bench.scheduler.cache
    one, twin = (bench.add(rid, [1, 2, 3, 4], max_new=5) for rid in "ab")
    first, second = plan(bench), plan(bench)
    own = cache.table.read(twin.row, 0, 4).tolist()
    free = cache.slots.free
    bench.absorb(first)
    assert cache.table.read(twin.row, 0, 4).tolist() == cache.table.read(one.row, 0, 4).tolist()
    assert cache.slots.free == free
    assert not set(own) & set(cache.table.read(one.row, 0, 4).tolist())
    bench.absorb(second)
    assert cache.slots.free == free + 4
    cache.check()


def test_nobody_is_retracted_while_a_step_is_in_flight():
    bench = Bench(pages=8)
    for rid, ids in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        bench.add(rid, ids)
    flying = plan(bench)
    while (step := bench.scheduler.next_plan(0.0)) is not None:
        bench.absorb(flying)
        flying = step
    assert bench.scheduler.retractions == 0
    bench.absorb(flying)
    assert bench.scheduler.next_plan(0.0) is not None
    assert bench.scheduler.retractions == 1


def test_a_row_of_a_sequence_that_began_anew_is_void():
    bench = Bench()
    one = bench.add("a", [1, 2, 3])
    old = plan(bench)
    bench.scheduler.retract(one)
    new = plan(bench)
    assert bench.absorb(old) == []
    assert (one.computed_len, one.flying, one.length) == (0, 3, 3)
    assert [p.token for p in bench.absorb(new)] == generate([1, 2, 3], 1)
    bench.scheduler.cache.check()


def test_what_is_given_up_when_nothing_is_in_flight_is_free_at_once():
    bench = Bench(pages=20)
    one = bench.add("a", [1, 2, 3])
    bench.step()
    cache: PrefixCache = bench.scheduler.cache
    leave(bench, one)
    assert cache.account().owned == 0
    assert cache.available == 20
