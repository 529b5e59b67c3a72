from __future__ import annotations

import pytest

from router.policy.prefill_work import (
    FASTEST,
    FIRST_GUESS,
    GROUP_WEIGHT,
    HALF_LIFE_S,
    Prefill,
    PrefillQueue,
    Speed,
    work_of,
)


def test_work_counts_new_tokens_and_what_they_attend_to():
    assert work_of(100, 100) == work_of(1, 1) > 0
    alone, behind = work_of(1000, 0), work_of(33_000, 32_000)
    assert 1000 < alone < 1100
    assert behind > 1.4 * alone  # the same new tokens after a long cached context


def test_speed_is_a_guess_then_a_ratio_of_sums():
    speed = Speed()
    assert speed.seconds_per_token == FIRST_GUESS
    speed.measured(3.0, 1000.0, 0.0)
    speed.measured(0.0, 1000.0, 0.0)  # ended with the same step
    assert speed.seconds_per_token == pytest.approx(3.0 / 2000)


def test_old_measurements_fade():
    speed = Speed()
    speed.measured(1.0, 1000.0, 0.0)
    speed.measured(4.0, 1000.0, HALF_LIFE_S)
    assert speed.seconds_per_token == pytest.approx(4.5 / 1500)


def test_a_rank_is_like_its_group_until_it_has_shown_otherwise():
    group = Speed()
    fast, slow = Speed(group), Speed(group)
    fast.measured(1.0, GROUP_WEIGHT, 0.0)
    assert slow.seconds_per_token == group.seconds_per_token == 1.0 / GROUP_WEIGHT
    slow.measured(3.0, GROUP_WEIGHT, 0.0)
    assert group.seconds_per_token == pytest.approx(2.0 / GROUP_WEIGHT)
    assert fast.seconds_per_token == pytest.approx(1.5 / GROUP_WEIGHT)
    assert slow.seconds_per_token == pytest.approx(2.5 / GROUP_WEIGHT)


def test_a_clock_that_stands_still_does_not_make_a_rank_free():
    speed = Speed()
    speed.measured(0.0, 1000.0, 0.0)
    assert speed.seconds_per_token == FASTEST


def test_a_queue_measures_from_when_the_rank_could_begin():
    queue = PrefillQueue(Speed())
    first, second = Prefill(500, 500.0, 0.0), Prefill(500, 500.0, 1.0)
    queue.sent(first)
    queue.sent(second)
    queue.first_token(first, 500.0, 5.0)  # 5 s of its own
    queue.first_token(second, 500.0, 8.0)  # 3 s of its own, not 7
    group = PrefillQueue(Speed())
    expected = Speed(Speed())
    expected.measured(5.0, 500.0, 5.0)
    expected.measured(3.0, 500.0, 8.0)
    assert queue.speed.seconds_per_token == pytest.approx(expected.seconds_per_token, rel=0.01)
    assert group.pending(8.0) == queue.pending(8.0) == 0.0
    assert (queue.active, queue.tokens) == (2, 0)


def test_a_request_that_leaves_takes_its_work_with_it():
    queue = PrefillQueue(Speed())
    prefills = [Prefill(100, 150.0, 0.0) for _ in range(2)]
    for prefill in prefills:
        queue.sent(prefill)
    assert queue.pending(0.0) == 300.0
    queue.left(prefills[0])
    assert queue.pending(0.0) == 150.0
    queue.left(prefills[1])
    assert (queue.pending(0.0), queue.active, queue.tokens) == (0.0, 0, 0)
