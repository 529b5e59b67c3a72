"""Who may start: pages, headroom, order, and waiting for somebody else's prefix."""

from __future__ import annotations

import pytest

from tests.support.engines import Bench
from tests.support.requests import request
from worker.scheduler.admission import WORTH_WAITING_FOR
from worker.scheduler.headroom import (
    AHEAD_AFTER_RETRACTION,
    DECAY_STEPS,
    FIRST_RATIO,
    LEAST_SHARE,
    MOST_OUTPUT,
    Headroom,
)
from worker.sequence import NO_ROW, Sequence


def numbers(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def started(rows: list[tuple[str, str, int]]) -> list[str]:
    return [rid for rid, _, _ in rows]


ALL = 1 / FIRST_RATIO  # conservativeness at which all the output still allowed is kept free


def test_running_sequences_and_the_new_one_keep_headroom_for_their_next_tokens():
    """Eleven pages, four of a prompt, and three more that its output will want."""
    for prompt, expected in ((3, ["a"]), (2, ["a", "b"])):
        bench = Bench(pages=11, conservativeness=ALL)
        bench.add("a", numbers(4), max_new=3)
        bench.add("b", numbers(prompt, 20), max_new=2)
        assert started(bench.step()) == expected


def test_a_sequence_alone_starts_whatever_it_may_want_later():
    bench = Bench(pages=10, conservativeness=ALL)
    bench.add("a", numbers(9), max_new=50)
    assert started(bench.step()) == ["a"]


def test_headroom_falls_while_sequences_decode_and_rises_with_a_retraction():
    headroom = Headroom(conservativeness=1.0)
    one = Sequence.of(request("a", numbers(4), 50), "router", 100)
    assert headroom.pages([one]) == 35
    for _ in range(2 * DECAY_STEPS):
        headroom.decoded()
    assert headroom.ratio == pytest.approx(FIRST_RATIO * LEAST_SHARE)
    assert headroom.pages([one]) == 5
    for token in range(10):
        one.append(token)
    headroom.retracted([one])
    assert headroom.ratio == pytest.approx((10 + AHEAD_AFTER_RETRACTION) / 51)
    headroom.decoded()
    assert headroom.ratio < (10 + AHEAD_AFTER_RETRACTION) / 51


def test_very_long_limits_count_as_no_more_than_a_long_answer():
    one = Sequence.of(request("a", numbers(4), 10 * MOST_OUTPUT), "router", 100)
    assert Headroom(ALL).pages([one]) == MOST_OUTPUT


def test_nobody_overtakes_the_one_at_the_front_who_does_not_fit():
    bench = Bench(pages=10)
    bench.add("a", numbers(6), max_new=3)
    bench.add("large", numbers(6, 20), max_new=1)
    bench.add("small", numbers(1, 40), max_new=1)
    assert started(bench.step()) == ["a"]
    bench.run()
    assert list(bench.outputs) == ["a", "large", "small"]


def test_a_refused_reservation_holds_nothing():
    bench = Bench(pages=10)
    bench.add("a", numbers(6), max_new=3)
    refused = bench.add("b", numbers(6), max_new=3)
    bench.step()
    before = bench.scheduler.cache.account()
    assert not bench.scheduler.admission.reserve(refused, (), 20, 5)
    assert bench.scheduler.cache.account() == before
    assert refused.row == NO_ROW
    bench.scheduler.cache.check()


def test_pages_of_finished_prompts_are_evicted_for_new_ones():
    bench = Bench(pages=10)
    bench.add("a", numbers(8), max_new=1)
    bench.run()
    assert bench.scheduler.cache.account().cached == 8
    bench.add("b", numbers(9, 20), max_new=1)
    assert started(bench.step()) == ["b"]


def test_a_closed_gate_holds_back_one_sequence_and_not_those_behind_it():
    bench = Bench()
    bench.scheduler.admission.gate = lambda sequence: sequence.rid != "a"
    bench.add("a", numbers(3))
    bench.add("b", numbers(3, 20))
    assert started(bench.step()) == ["b"]


def test_a_prompt_waits_for_a_running_prefill_that_computes_its_prefix():
    cached, more = 40, WORTH_WAITING_FOR  # by the first chunk, and by the second
    shared = numbers(cached + more)
    bench = Bench(step_tokens=cached)
    bench.add("a", [*shared, 98], max_new=3)
    twin = bench.add("b", [*shared, 99], max_new=3)
    assert bench.step() == [("a", "extend", cached)]
    assert bench.step() == [("a", "extend", more + 1)]  # with budget left for b
    assert bench.step() == [("a", "decode", 1), ("b", "extend", 1)]
    assert twin.cached_len == len(shared)


def test_a_few_tokens_less_are_not_worth_waiting_for():
    cached, more = 40, WORTH_WAITING_FOR - 1
    shared = numbers(cached + more)
    bench = Bench(step_tokens=cached)
    bench.add("a", [*shared, 98])
    bench.add("b", [*shared, 99])
    bench.step()
    assert started(bench.step()) == ["a", "b"]


def test_nobody_waits_for_a_prefill_of_another_salt():
    shared = numbers(40 + WORTH_WAITING_FOR)
    bench = Bench(step_tokens=40)
    bench.add("a", [*shared, 98])
    bench.add("b", [*shared, 99], salt="mine")
    bench.step()
    assert started(bench.step()) == ["a", "b"]


def test_what_another_salt_has_cached_does_not_count_as_cached():
    shared = numbers(72)
    bench = Bench(step_tokens=40)
    bench.add("first", shared, max_new=1)
    bench.run()
    bench.add("a", [*shared, 98], salt="mine")
    twin = bench.add("b", [*shared, 99], salt="mine")
    bench.step()
    assert started(bench.step()) == ["a"]
    bench.run()
    assert twin.cached_len == len(shared)


def test_nobody_waits_for_a_prefix_that_is_cached_already():
    shared = numbers(72)
    bench = Bench(step_tokens=40)
    bench.add("first", shared, max_new=1)
    bench.run()
    bench.add("a", [*shared, 98, 97])
    bench.add("b", [*shared, 99])
    assert started(bench.step()) == ["a", "b"]
