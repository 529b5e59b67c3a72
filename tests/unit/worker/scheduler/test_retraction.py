"""When pages run out: whom it hits, and that the output does not show it."""

from __future__ import annotations

from tests.support.engines import CONTEXT, Bench
from tests.support.fake_runner import generate
from tests.support.requests import request
from worker.scheduler.waiting import WaitingQueue
from worker.sequence import Sequence, SequenceState


def test_the_one_that_generated_least_is_retracted_and_ends_with_the_same_tokens():
    bench = Bench(pages=12, max_running=3)
    old = bench.add("old", [1, 2], max_new=9)
    for _ in range(3):
        bench.step()
    young = bench.add("young", [3, 4], max_new=9)
    while not bench.scheduler.retractions:
        bench.step()
    assert young.state is SequenceState.WAITING
    assert (young.retractions, old.retractions) == (1, 0)
    bench.run()
    assert bench.outputs["old"] == generate([1, 2], 9)
    assert bench.outputs["young"] == generate([3, 4], 9)


def test_of_two_that_generated_as_much_the_longer_one_gives_more_pages_back():
    bench = Bench(pages=14, step_tokens=100)
    long, short = bench.add("long", [1, 2, 3, 4, 5]), bench.add("short", [6, 7])
    while not bench.scheduler.retractions:
        bench.step()
    assert (long.retractions, short.retractions) == (1, 0)


def test_a_lower_priority_gives_its_pages_up_before_one_that_generated_less():
    bench = Bench(pages=12, max_running=3)
    low = bench.add("low", [1, 2], max_new=9, priority=-1)
    for _ in range(3):
        bench.step()
    young = bench.add("young", [3, 4], max_new=9)
    while not bench.scheduler.retractions:
        bench.step()
    assert (low.retractions, young.retractions) == (1, 0)
    bench.run()
    assert bench.outputs["low"] == generate([1, 2], 9)


def test_a_higher_priority_starts_before_what_was_retracted():
    bench = Bench(pages=40, max_running=1)
    one = bench.add("a", [1, 2, 3], max_new=4)
    bench.step()
    bench.scheduler.retract(one)
    bench.add("b", [4, 5, 6], max_new=4, priority=1)
    assert [rid for rid, _, _ in bench.step()] == ["b"]


def test_tokens_generated_elsewhere_do_not_protect_a_sequence():
    """A migrated request would recompute nothing that this rank sampled."""
    bench = Bench(pages=14, step_tokens=100)
    migrated = Sequence.of(request("m", [1, 2, 3, 4], 20, prompt_len=1), "router", CONTEXT)
    assert (migrated.output_len, migrated.generated_here) == (3, 0)
    own = bench.add("own", [6, 7], max_new=20)
    bench.step()
    bench.scheduler.add(migrated)
    while not bench.scheduler.retractions:
        bench.step()
    assert (migrated.retractions, own.retractions) == (1, 0)


def test_a_retracted_sequence_finds_its_own_kv_in_the_cache():
    bench = Bench(pages=40)
    one = bench.add("a", list(range(10)), max_new=5)
    for _ in range(3):
        bench.step()
    bench.scheduler.retract(one)
    assert one.length == 13
    assert bench.step() == [("a", "extend", 1)]
    assert one.cached_len == 0  # the client is told what was cached when it came
    bench.run()
    assert bench.outputs["a"] == generate(list(range(10)), 5)


def test_a_sequence_alone_can_always_finish_in_a_pool_of_its_own_size():
    bench = Bench(pages=10)
    bench.add("a", [1, 2, 3], max_new=8)  # its last token needs no page
    bench.run()
    assert bench.outputs["a"] == generate([1, 2, 3], 8)
    assert bench.scheduler.retractions == 0


def test_a_retracted_sequence_goes_on_before_those_that_have_not_started():
    bench = Bench(pages=40, max_running=1)
    one = bench.add("a", [1, 2, 3], max_new=4)
    bench.add("b", [4, 5, 6], max_new=4)
    bench.step()
    bench.scheduler.retract(one)
    assert [rid for rid, _, _ in bench.step()] == ["a"]


def test_retracted_sequences_wait_in_front():
    queue = WaitingQueue()
    first, second, retracted = (
        Sequence.of(request(rid, [1] * n, 1), "router", CONTEXT)
        for n, rid in enumerate("abc", start=1)
    )
    queue.push(first)
    queue.push(second)
    queue.push_front(retracted)
    assert list(queue) == [retracted, first, second]
    assert len(queue) == 3
    for sequence in queue:  # removing while iterating is allowed
        queue.remove(sequence)
    assert first not in queue
    assert len(queue) == 0
