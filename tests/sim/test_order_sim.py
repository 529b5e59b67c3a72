"""Nobody starves: requests with a better match keep coming, and a start is bounded all the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.engines import Bench
from worker.scheduler import orders
from worker.scheduler.orders import PATIENCE_S
from worker.sequence import Sequence, SequenceState

STEP_S = 0.5
HOT = list(range(80))  # of a context of 100: the longest match the adversary has


def adversary(schedule: str, steps: int) -> int | None:
    """The step in which a request without a match starts, one newer and better each step."""
    bench = Bench(schedule=schedule, max_running=1, step_tokens=100)
    bench.add("hot", [*HOT, 99], max_new=1)
    bench.step()
    victim = bench.add("victim", [98, 98], max_new=1)
    for number in range(steps):
        for twin in "ab":  # twice what can be served
            bench.add(f"{number}{twin}", [*HOT, number % 90, ord(twin)], max_new=1)
        bench.now += STEP_S
        bench.step()
        if victim.state is not SequenceState.WAITING:
            return number
    return None


@pytest.mark.parametrize("schedule", ["lpm", "dfs_weight"])
def test_a_request_without_a_match_starts_after_those_that_came_within_the_patience(schedule):
    started = adversary(schedule, 200)
    assert started is not None
    assert 2 < started <= 2 * PATIENCE_S / STEP_S


@pytest.mark.parametrize("schedule", ["lpm", "dfs_weight"])
def test_without_patience_it_would_starve(schedule, monkeypatch):
    """Guards the simulation: its adversary is as bad as it claims."""
    monkeypatch.setattr(orders, "PATIENCE_S", 1e9)
    assert adversary(schedule, 200) is None


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(["fcfs", "lpm", "dfs_weight"]),
    arrivals=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=3),
        min_size=20,
        max_size=60,
    ),
)
def test_nobody_is_overtaken_by_one_that_came_much_later(schedule, arrivals):
    bench = Bench(schedule=schedule, max_running=2, step_tokens=40)
    waiting: dict[Sequence, float] = {}
    for number, coming in enumerate(arrivals):
        bench.now += STEP_S
        for index, (stem, length) in enumerate(coming):
            ids = [stem] * length + [50 + index, number]
            waiting[bench.add(f"{number}.{index}", ids, max_new=2)] = bench.now
        bench.step()
        started = [s for s in waiting if s.state is not SequenceState.WAITING or s.output_len]
        for one in started:
            came = waiting.pop(one)
            assert not any(since < came - PATIENCE_S for since in waiting.values())
