from __future__ import annotations

import time

import pytest

from core.clock import RealClock, VirtualClock


def test_a_virtual_clock_moves_only_when_told():
    clock = VirtualClock(start=5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(2.5)
    assert clock.now() == clock.epoch() == 7.5


def test_time_does_not_go_back():
    clock = VirtualClock()
    with pytest.raises(AssertionError):
        clock.advance(-1.0)


def test_the_real_clock_measures_durations_and_tells_the_date():
    clock = RealClock()
    before = time.monotonic()
    assert before <= clock.now() <= time.monotonic()
    assert clock.epoch() > 1_700_000_000  # after November 2023
