"""When sessions start: on a virtual clock, against a sender that takes as long as it is told."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count, pairwise
from typing import Any

import pytest

from bench.client import Request
from bench.config import BenchConfig
from bench.outcome import Outcome
from bench.run import NOT_SENT, Runner, arrivals
from bench.sessions import Session, Turn
from bench.words import Span
from core.clock import VirtualClock


class World:
    """A virtual clock that moves to the next sleeper when nothing else can run."""

    def __init__(self) -> None:
        self.clock = VirtualClock(start=100.0)
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = count()

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        entry = (self.clock.now() + seconds, next(self._number), woken)
        heapq.heappush(self._sleepers, entry)
        await woken

    async def run(self, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):  # let everybody run until all of them wait
                await asyncio.sleep(0)
            if self._sleepers:
                at_s, _, woken = heapq.heappop(self._sleepers)
                self.clock.advance(max(0.0, at_s - self.clock.now()))
                woken.set_result(None)
        return task.result()


class SlowSender:
    """Answers every request after ``seconds``; fails those whose (session, turn) is named."""

    def __init__(self, world: World, seconds: float, failing: tuple[int, int] | None = None):
        self.world = world
        self.seconds = seconds
        self.failing = failing
        self.requests: list[Request] = []
        self.in_flight = self.peak = 0

    async def send(self, request: Request) -> Outcome:
        start_s = self.world.clock.now()
        self.requests.append(request)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        await self.world.sleep(self.seconds)
        self.in_flight -= 1
        failed = (request.session, request.turn) == self.failing
        return Outcome(
            session=request.session,
            turn=request.turn,
            due_s=request.due_s,
            start_s=start_s,
            end_s=self.world.clock.now(),
            error="broken" if failed else None,
            finish="length",
            text=f"<answer {request.session}.{request.turn}>",
        )


def single(requests: int) -> list[Session]:
    return [Session((Turn((Span(str(i), 3),), 1),), at_s=float(i)) for i in range(requests)]


def play(sender: SlowSender, config: BenchConfig, sessions, *, concurrency=None, offsets=None):
    world = sender.world
    runner = Runner(sender, config, world.clock, sleep=world.sleep)
    work = (
        runner.open_loop(sessions, offsets)
        if offsets is not None
        else runner.closed_loop(sessions, concurrency)
    )
    return asyncio.run(world.run(work))


def test_an_open_loop_starts_on_time_however_slow_the_server_is():
    sender = SlowSender(World(), seconds=50.0)
    outcomes = play(sender, BenchConfig(), single(5), offsets=[0.0, 1.0, 1.5, 1.5, 7.0])
    assert [o.start_s - 100 for o in outcomes] == [0.0, 1.0, 1.5, 1.5, 7.0]
    assert all(o.lag_s == 0 for o in outcomes)
    assert sender.peak == 5


def test_a_closed_loop_keeps_so_many_in_flight():
    sender = SlowSender(World(), seconds=2.0)
    outcomes = play(sender, BenchConfig(), single(7), concurrency=3)
    assert sender.peak == 3
    assert sorted(o.start_s - 100 for o in outcomes) == [0, 0, 0, 2, 2, 2, 4]
    assert sorted(o.session for o in outcomes) == list(range(7))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_each_turn_carries_the_real_answers_before_it(endpoint):
    sessions = [Session(tuple(Turn((Span(f"{s}.{t}", 3),), 1) for t in range(3))) for s in (0, 1)]
    sender = SlowSender(World(), seconds=1.0)
    play(sender, BenchConfig(endpoint=endpoint), sessions, concurrency=2)
    for session in (0, 1):
        first, second, third = [r.prompt for r in sender.requests if r.session == session]
        answers = [f"<answer {session}.0>", f"<answer {session}.1>"]
        if endpoint == "chat":
            roles = [message["role"] for message in third]
            assert roles == ["user", "assistant", "user", "assistant", "user"]
            assert [third[1]["content"], third[3]["content"]] == answers
            assert third[:3] == second
            assert third[:1] == first
        else:
            assert second.startswith(first + answers[0] + " ")
            assert third.startswith(second + answers[1] + " ")


def test_after_a_failed_turn_the_rest_counts_as_failed():
    session = Session(tuple(Turn((Span(str(t), 3),), 1) for t in range(4)))
    sender = SlowSender(World(), seconds=1.0, failing=(0, 1))
    outcomes = play(sender, BenchConfig(), [session], concurrency=1)
    assert [o.error for o in outcomes] == [None, "broken", NOT_SENT, NOT_SENT]
    assert [o.turn for o in outcomes] == [0, 1, 2, 3]
    assert len(sender.requests) == 2


def test_a_rate_gives_poisson_arrivals():
    sessions = single(4000)
    times = arrivals(BenchConfig(rate=5.0), sessions)
    assert times == arrivals(BenchConfig(rate=5.0), sessions)
    assert times != arrivals(BenchConfig(rate=5.0, seed=1), sessions)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0
    assert mean == pytest.approx(0.2, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.1)  # exponential: they are equal


def test_a_trace_keeps_its_times_at_a_speed():
    sessions = [Session((), at_s) for at_s in (10.0, 12.0, 16.0)]
    trace = {"workload": "trace", "trace": "t.csv"}
    assert arrivals(BenchConfig(**trace), sessions) == [0, 2, 6]
    assert arrivals(BenchConfig(**trace, speed=4.0), sessions) == [0, 0.5, 1.5]
    assert arrivals(BenchConfig(**trace, concurrency=2), sessions) is None
    assert arrivals(BenchConfig(), sessions) is None
