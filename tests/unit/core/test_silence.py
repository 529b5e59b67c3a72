"""Silence counts the other side's, not our own."""

from __future__ import annotations

from core.lease import SLACK_S, Silence


def test_silence_lasts_from_what_was_heard_to_the_latest_look():
    silence = Silence.begun(100.0)
    for now in (101.0, 102.0, 103.0):
        silence = silence.after(now, 1.0)
    assert silence.lasted_s == 3.0
    assert silence.heard(104.0).lasted_s == 0.0
    assert silence.heard(104.0).after(105.0, 1.0).lasted_s == 1.0


def test_a_wait_that_took_longer_than_it_was_meant_to_counts_as_long_as_that():
    silence = Silence.begun(0.0).after(1.0, 1.0).after(62.0, 1.0)
    assert silence.lasted_s == 2.0
    assert silence.after(63.0, 1.0).lasted_s == 3.0


def test_small_delays_and_waits_that_end_early_count_as_they_are():
    assert Silence.begun(0.0).after(1.0 + SLACK_S, 1.0).lasted_s == 1.0 + SLACK_S
    assert Silence.begun(0.0).after(0.25, 1.0).lasted_s == 0.25
