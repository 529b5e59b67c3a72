"""A rank whose lease runs out, by a clock that is moved by hand."""

from __future__ import annotations

import signal
import threading

import pytest

from core.clock import RealClock, VirtualClock
from worker.lifeline import END_S, Lifeline

LIMIT_S = 30.0


class Timers:
    """What the system's timer was set to, the latest last."""

    def __init__(self) -> None:
        self.set: list[float] = []

    def __call__(self, which: int, seconds: float) -> None:
        assert which == signal.ITIMER_REAL
        self.set.append(seconds)


@pytest.fixture
def timers(monkeypatch):
    """No test may end by a signal."""
    timers = Timers()
    monkeypatch.setattr(signal, "setitimer", timers)
    return timers


def test_a_lease_runs_out_when_nobody_renews_it(timers):
    clock = VirtualClock()
    line = Lifeline(LIMIT_S, clock, lambda: None)
    for second in range(1, 100):
        clock.advance(1.0)
        if second < 70:
            line.renewed("s1")
        assert line.look(1.0) == (second >= 69 + LIMIT_S)


def test_what_the_rank_itself_slept_does_not_count(timers):
    clock = VirtualClock()
    line = Lifeline(LIMIT_S, clock, lambda: None)
    clock.advance(3600.0)
    assert not line.look(1.0)
    clock.advance(LIMIT_S - 1.0)
    assert line.look(LIMIT_S - 1.0)


def test_its_thread_ends_the_rank_once_and_says_why(timers, caplog):
    ended = threading.Event()
    line = Lifeline(0.05, RealClock(), ended.set)
    line.renewed("s7")
    line.start()
    assert ended.wait(10.0)
    assert "no supervisor has renewed this rank's lease for 0.05 s" in caplog.text
    assert "s7" in caplog.text


def test_a_rank_that_stops_by_order_does_not_end_for_want_of_a_supervisor(timers):
    ended = threading.Event()
    line = Lifeline(0.1, RealClock(), ended.set)
    line.start()
    line.stop()
    assert not ended.wait(0.25)
    assert timers.set[-1] == 0


def test_the_systems_timer_stands_behind_it_and_each_renewal_sets_it_again(timers):
    line = Lifeline(LIMIT_S, VirtualClock(), lambda: None)
    assert timers.set == []
    line.renewed("s1")
    line.renewed("s1")
    assert timers.set == [LIMIT_S + END_S] * 2
