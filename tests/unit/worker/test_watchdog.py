"""The watchdog looks at a recorder whose clock is moved by hand."""

from __future__ import annotations

import logging

import pytest

from core.clock import VirtualClock
from worker.recorder import Facts, Recorder
from worker.watchdog import Watchdog

LIMIT_S = 30.0


class Watched:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.recorder = Recorder(self.clock)
        self.reports = 0
        self.dog = Watchdog(LIMIT_S, self.recorder, lambda: "  in a kernel", self._report)

    def _report(self) -> None:
        self.reports += 1

    def turn(self, seconds: float) -> None:
        """One whole turn, with a look at its end."""
        self.recorder.begin("launch")
        self.clock.advance(seconds)
        self.dog.look()
        self.recorder.end(Facts())


@pytest.fixture
def watched(caplog):
    caplog.set_level(logging.INFO)
    return Watched()


def test_turns_within_the_limit_and_long_waits_are_no_news(watched, caplog):
    for _ in range(3):
        watched.turn(LIMIT_S - 0.1)
        watched.clock.advance(1000.0)
        watched.dog.look()
    assert watched.reports == 0
    assert not caplog.records


def test_a_stuck_turn_is_reported_once_with_the_stack_and_what_it_does(watched, caplog):
    watched.recorder.begin("launch")
    for _ in range(4):
        watched.clock.advance(LIMIT_S)
        watched.dog.look()
    assert watched.reports == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    message = record.getMessage()
    assert "stuck for 30.0 s in 'launch'" in message
    assert message.endswith("  in a kernel")


def test_its_end_is_said_and_the_next_one_is_news_again(watched, caplog):
    watched.turn(LIMIT_S)
    watched.dog.look()
    assert caplog.records[-1].levelno == logging.WARNING
    assert "goes on after more than 30.0 s" in caplog.records[-1].getMessage()
    watched.dog.look()
    assert len(caplog.records) == 2
    watched.turn(2 * LIMIT_S)
    assert watched.reports == 2


def test_one_stuck_turn_right_after_another_is_another_report(watched, caplog):
    watched.turn(LIMIT_S)
    watched.turn(LIMIT_S)  # nobody looked between
    assert watched.reports == 2
    words = [record.levelname for record in caplog.records]
    assert words == ["ERROR", "WARNING", "ERROR"]
