"""The thread around an engine: wakes, answers, ends, and says when it died."""

from __future__ import annotations

import gc
import logging
import queue
import threading

import pytest

import worker.loop
from core.clock import VirtualClock
from core.rpc.events import Pinged, StatusAsked, Submitted
from core.wire import RankStatus, StepReport
from tests.support.engines import make_unified
from tests.support.fake_runner import generate
from tests.support.requests import request
from tests.support.wires import incarnation, rank_info
from worker.engine import Engine
from worker.loop import StepLoop
from worker.plan import StepPlan, StepResult
from worker.roles.unified import UnifiedRole

SOON_S = 10.0


class Attended:
    """A step loop with everything it says kept in queues."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.clock = VirtualClock()
        self.reports: queue.SimpleQueue[tuple[str, StepReport]] = queue.SimpleQueue()
        self.crashed = threading.Event()
        self.loop = StepLoop(
            engine,
            rank_info(incarnation()),
            self.clock,
            lambda *report: self.reports.put(report),
            self.crashed.set,
        )

    def status(self) -> RankStatus:
        answers: queue.SimpleQueue[RankStatus] = queue.SimpleQueue()
        self.loop.post(StatusAsked(answers.put))
        return answers.get(timeout=SOON_S)

    @property
    def running(self) -> bool:
        return any(thread.name == "step-loop" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def only_events_wake(monkeypatch):
    """An idle loop would look around by itself every so often: not in these tests."""
    monkeypatch.setattr(worker.loop, "IDLE_WAIT_S", 3600.0)
    yield
    gc.unfreeze()


@pytest.fixture
def attend():
    attended: list[Attended] = []

    def start(engine: Engine) -> Attended:
        attended.append(Attended(engine))
        attended[-1].loop.start()
        return attended[-1]

    yield start
    for each in attended:
        each.loop.stop(SOON_S)
        assert not each.running


def test_a_posted_request_wakes_the_loop_and_runs_to_its_end(attend):
    attended = attend(make_unified())
    attended.loop.post(Submitted("a", request("r", [1, 2, 3], 4)))
    tokens: list[int] = []
    while len(tokens) < 4:
        router, report = attended.reports.get(timeout=SOON_S)
        assert router == "a"
        tokens += [token for chunk in report.chunks for token in chunk.token_ids]
    assert tokens == generate([1, 2, 3], 4)


def test_the_loop_sleeps_again_after_its_work(attend):
    attended = attend(make_unified())
    for turn in range(3):
        attended.loop.post(Pinged("a"))
        _, report = attended.reports.get(timeout=SOON_S)
        assert (report.chunks, report.load.steps) == ((), 0), turn
    assert attended.reports.empty()


def test_wake_asks_for_a_step(attend):
    polled: queue.SimpleQueue[float] = queue.SimpleQueue()

    class Polled(UnifiedRole):
        def poll(self, now: float) -> None:
            polled.put(now)

    attended = attend(make_unified(role=Polled))
    attended.clock.advance(3.0)
    attended.loop.wake()
    assert polled.get(timeout=SOON_S) == 3.0


def test_the_loop_answers_for_the_status_of_its_rank(attend):
    attended = attend(make_unified(pages=300))
    attended.clock.advance(2.5)
    status = attended.status()
    assert status.info == attended.loop.info
    assert status.uptime_s == 2.5
    assert (status.pages.total, status.pages.free) == (300, 300)
    assert status.load.total_pages == 300
    assert status.handoffs == {}


def test_automatic_garbage_collection_is_off_while_the_loop_runs(attend):
    attended = attend(make_unified())
    attended.status()
    assert not gc.isenabled()
    attended.loop.stop(SOON_S)
    assert gc.isenabled()


def test_garbage_is_collected_where_nothing_runs_and_never_between_two_steps(attend, monkeypatch):
    monkeypatch.setattr(worker.loop, "IDLE_WAIT_S", 0.01)
    engine = make_unified()
    attended = attend(engine)
    attended.status()
    while_busy: list[int] = []
    at_rest = threading.Event()

    def collecting(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            at_rest.set() if engine.idle else while_busy.append(engine.steps)

    gc.callbacks.append(collecting)
    try:
        attended.loop.post(Submitted("a", request("r", [1, 2, 3], 40)))
        tokens = 0
        while tokens < 40:
            _, report = attended.reports.get(timeout=SOON_S)
            tokens += sum(len(chunk.token_ids) for chunk in report.chunks)
        assert at_rest.wait(SOON_S)
    finally:
        gc.callbacks.remove(collecting)
    assert not while_busy


def test_stop_ends_the_loop_without_a_word_of_a_crash(attend, caplog):
    attended = attend(make_unified())
    attended.status()
    attended.loop.stop(SOON_S)
    assert not attended.running
    assert not attended.crashed.is_set()
    assert not caplog.records


class Broken:
    """A runner that fails, as a model with a defect would."""

    def launch(self, plan: StepPlan) -> StepPlan:
        raise ZeroDivisionError("a defect")

    def collect(self, ticket: StepPlan) -> StepResult:
        raise AssertionError("nothing was launched")


def test_a_defect_in_a_step_is_reported_and_ends_the_rank(attend, monkeypatch, caplog):
    uncaught: queue.SimpleQueue[threading.ExceptHookArgs] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", uncaught.put)
    engine = make_unified()
    engine.runner = Broken()
    attended = attend(engine)
    with caplog.at_level(logging.CRITICAL):
        attended.loop.post(Submitted("a", request("r", [1, 2, 3], 4)))
        assert attended.crashed.wait(SOON_S)
        assert uncaught.get(timeout=SOON_S).exc_type is ZeroDivisionError
    assert "died" in caplog.text
    assert gc.isenabled()


def test_the_last_words_name_the_defect_its_requests_and_the_steps_before(
    attend, monkeypatch, caplog
):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = make_unified()
    attended = attend(engine)
    with caplog.at_level(logging.CRITICAL):
        attended.loop.post(Submitted("a", request("good", [1, 2, 3], 2)))
        for _ in range(2):
            attended.reports.get(timeout=SOON_S)
        engine.runner = Broken()
        attended.loop.post(Submitted("a", request("poison", [1, 2, 3], 4)))
        assert attended.crashed.wait(SOON_S)
    (record,) = caplog.records  # before the process is told to end
    message = record.getMessage()
    assert "in 'launch' of step 3 with 1 extend + 0 decode rows, 1 tokens of poison" in message
    assert [line[:2] for line in message.splitlines()[1:]] == ["#1", "#2"]
    assert record.exc_info[0] is ZeroDivisionError
