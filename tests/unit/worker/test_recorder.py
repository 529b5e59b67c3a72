"""The last turns of a step loop, on a clock that is moved by hand."""

from __future__ import annotations

import pytest

from core.clock import VirtualClock
from tests.support.engines import Bench
from worker.recorder import Facts, Recorder

FACTS = Facts(running=2, waiting=1, live=5, free_pages=77, retractions=3)


@pytest.fixture
def clock():
    return VirtualClock(100.0)


def a_step():
    """One prompt chunk beside one decoding sequence: 16 tokens."""
    bench = Bench(step_tokens=16)
    bench.add("short", [1, 2, 3])
    bench.step()
    bench.add("long", list(range(20)))
    step = bench.scheduler.next_plan(0.0)
    assert step is not None
    return step


def test_a_turn_with_a_step_is_recorded_with_its_parts(clock):
    recorder = Recorder(clock)
    recorder.begin("events")
    clock.advance(0.25)
    recorder.lap("launch")
    recorder.planned(8, a_step())
    clock.advance(0.5)
    recorder.end(FACTS)
    (record,) = recorder.records()
    assert (record.step, record.at, record.took_s) == (8, 100.0, 0.75)
    assert record.laps == {"events": 0.25, "launch": 0.5}
    assert (record.extend_rows, record.decode_rows, record.tokens) == (1, 1, 16)
    assert (record.running, record.waiting, record.live) == (2, 1, 5)
    assert (record.free_pages, record.retractions) == (77, 3)
    assert (recorder.busy_s, recorder.last_step_s) == (0.75, 0.75)


def test_a_turn_without_a_step_is_kept_only_when_it_was_long(clock):
    recorder = Recorder(clock)
    for took_s in (0.001, 3.0):
        recorder.begin("poll")
        clock.advance(took_s)
        recorder.end(FACTS)
    assert [record.took_s for record in recorder.records()] == [3.0]
    assert recorder.busy_s == 0.0


def test_it_forgets_the_oldest_turns(clock):
    recorder, step = Recorder(clock, kept=3), a_step()
    for number in range(1, 6):
        recorder.begin("launch")
        recorder.planned(number, step)
        recorder.end(FACTS)
        assert [r.step for r in recorder.records()] == list(range(max(1, number - 2), number + 1))


def test_busy_says_where_a_turn_is_and_whom_it_serves(clock):
    recorder = Recorder(clock)
    assert recorder.busy() is None
    recorder.begin("plan")
    clock.advance(1.0)
    first = recorder.busy()
    assert first is not None
    assert (first.for_s, first.lap, first.rids) == (1.0, "plan", ())
    recorder.planned(8, a_step())
    recorder.lap("launch")
    clock.advance(2.0)
    busy = recorder.busy()
    assert busy is not None
    assert (busy.turn, busy.for_s, busy.lap, busy.step) == (first.turn, 3.0, "launch", 8)
    assert (busy.extend_rows, busy.decode_rows, busy.tokens) == (1, 1, 16)
    assert busy.rids == ("short", "long")
    recorder.end(FACTS)
    assert recorder.busy() is None
    recorder.begin("events")
    later = recorder.busy()
    assert later is not None
    assert later.turn != busy.turn
    assert later.rids == ()
