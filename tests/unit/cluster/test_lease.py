"""The judgement on a rank, under a clock that is moved by hand."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.lease import LEAST_PATIENCE_S, Lease, Verdict
from core.config import LeaseConfig
from core.lease import Health

LIMITS = LeaseConfig(renew_s=1.0, lease_s=10.0, stuck_limit_s=60.0)


class Held:
    """A lease whose renewals the test answers, or does not."""

    def __init__(self, limits: LeaseConfig = LIMITS) -> None:
        self.now = 1000.0
        self.lease = Lease.begun(limits, self.now)

    def answer(self, turn: int = 1, busy_s: float = 0.0, doing: str = "") -> Verdict:
        health = Health(step=7, turn=turn, busy_s=busy_s, doing=doing)
        self.lease = self.lease.answered(self.now, health)
        self._rest()
        return self.lease.verdict

    def time_out(self, late_s: float = 0.0) -> Verdict:
        """The rank says nothing for as long as a renewal waits; we wake late."""
        return self.fail(self.lease.patience_s, late_s, "DEADLINE_EXCEEDED")

    def fail(self, took_s: float, late_s: float = 0.0, words: str = "UNAVAILABLE") -> Verdict:
        patience_s = self.lease.patience_s
        self.now += took_s + late_s
        self.lease = self.lease.failed(self.now, patience_s, words)
        self._rest()
        return self.lease.verdict

    def _rest(self) -> None:
        if self.lease.verdict is Verdict.FINE:
            pause_s = self.lease.limits.renew_s
            self.now += pause_s
            self.lease = self.lease.rested(self.now, pause_s)


def test_a_rank_that_answers_is_fine_for_ever():
    held = Held()
    assert {held.answer(turn) for turn in range(100)} == {Verdict.FINE}
    assert held.lease.words == ""


def test_a_rank_that_says_nothing_is_lost_when_its_lease_is_over_and_not_before():
    held = Held()
    held.answer()
    heard = held.now - LIMITS.renew_s
    while held.time_out() is Verdict.FINE:
        assert held.now - heard < LIMITS.lease_s
    assert held.lease.verdict is Verdict.LOST
    assert held.now - heard == pytest.approx(LIMITS.lease_s)
    assert held.lease.words == "no answer for 10 s (DEADLINE_EXCEEDED)"


def test_a_rank_that_never_answered_is_lost_as_soon():
    held = Held()
    while held.time_out() is Verdict.FINE:
        pass
    assert held.now == 1010.0


def test_calls_that_fail_at_once_do_not_shorten_the_lease():
    held = Held()
    held.answer()
    failures = 0
    while held.fail(0.0) is Verdict.FINE:
        failures += 1
    assert failures == 9


def test_one_answer_in_time_makes_up_for_all_that_failed():
    held = Held()
    for _ in range(20):
        assert held.time_out() is Verdict.FINE
        assert held.lease.words.startswith("no answer for")
        assert held.answer() is Verdict.FINE
        assert held.lease.words == ""


def test_at_least_two_renewals_fit_into_a_lease_and_the_last_one_ends_with_it():
    held = Held()
    held.answer()
    waits = []
    while True:
        waits.append(held.lease.patience_s)
        if held.time_out() is not Verdict.FINE:
            break
    assert waits == [5.0, 3.0]
    assert Lease.begun(LIMITS, 0.0).failed(99.0, 99.0, "x").patience_s == LEAST_PATIENCE_S


@pytest.mark.parametrize("asleep_s", [9.0, 60.0, 86400.0])
def test_what_the_supervisor_slept_is_not_held_against_the_rank(asleep_s):
    held = Held()
    held.answer()
    assert held.time_out(late_s=asleep_s) is Verdict.FINE  # while a renewal was under way
    held.answer()
    held.now += asleep_s  # between two
    held.lease = held.lease.rested(held.now, 0.0)
    assert held.fail(0.0) is Verdict.FINE


def test_a_long_step_is_no_reason_and_a_stuck_one_is_when_two_answers_say_so():
    held = Held()
    assert held.answer(busy_s=59.9) is Verdict.FINE
    assert held.answer(busy_s=60.5) is Verdict.FINE
    assert held.answer(busy_s=61.5, doing="in 'launch' of step 7") is Verdict.STUCK
    assert held.lease.words == "in one step for 62 s, in 'launch' of step 7"


def test_turns_that_only_look_long_after_a_freeze_are_forgiven():
    held = Held()
    assert held.answer(turn=1, busy_s=300.0) is Verdict.FINE
    assert held.answer(turn=2, busy_s=300.0) is Verdict.FINE
    assert held.answer(turn=3, busy_s=0.1) is Verdict.FINE
    assert held.answer(turn=3, busy_s=60.0) is Verdict.FINE


def test_steps_may_take_for_ever_where_the_limit_is_off():
    held = Held(LeaseConfig(stuck_limit_s="off"))
    for hour in range(1, 5):
        assert held.answer(busy_s=3600.0 * hour) is Verdict.FINE


def test_a_stuck_rank_that_falls_silent_is_lost():
    held = Held()
    held.answer(busy_s=50.0)
    while held.time_out() is Verdict.FINE:
        pass
    assert held.lease.verdict is Verdict.LOST


def test_a_lease_never_changes():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Held().lease.problem = "x"
