from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from core.clock import VirtualClock
from core.config import CacheAwareConfig
from core.metrics import NullSink
from core.wire import LoadReport
from router.policy.base import POLICIES, PolicyContext
from tests.support.candidates import Rank

PROMPT = np.arange(5, dtype=np.int32)


def load(name):
    context = PolicyContext(CacheAwareConfig(), VirtualClock(), NullSink())
    return POLICIES.load(name)(context)


def numbers(policy, ranks, times):
    found = []
    for _ in range(times):
        chosen, ticket = policy.assign(ranks, PROMPT)
        ticket.ended(None)
        found.append(chosen.number)
    return found


@pytest.fixture(params=sorted(POLICIES))
def policies(request):
    return load(request.param)


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_equal_ranks_get_equal_shares(policies, half):
    ranks = [Rank(2), Rank(0), Rank(1)]
    assert Counter(numbers(getattr(policies, half), ranks, 9)) == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_ranks_may_come_and_go(policies, half):
    policy = getattr(policies, half)
    assert numbers(policy, [Rank(0), Rank(1)], 1) == [0]
    assert numbers(policy, [Rank(3)], 2) == [3, 3]
    policy.forget(Rank(3).incarnation)
    policy.forget(Rank(5).incarnation)
    assert sorted(numbers(policy, [Rank(0), Rank(1), Rank(4)], 3)) == [0, 1, 4]


def test_round_robin_goes_on_after_the_last_one():
    policy = load("round_robin").prefill
    ranks = [Rank(0), Rank(1, outstanding_tokens=10_000), Rank(2)]
    assert numbers(policy, ranks, 4) == [0, 1, 2, 0]
    assert numbers(policy, [ranks[0], ranks[2]], 2) == [2, 0]


def test_least_load_prefers_our_own_bookings_then_the_report_then_turns():
    policy = load("least_load").prefill
    busy = LoadReport(waiting_tokens=900)
    assert numbers(policy, [Rank(0, 50), Rank(1, 49, load=busy)], 2) == [1, 1]
    assert numbers(policy, [Rank(0, 50, load=busy), Rank(1, 50)], 2) == [1, 1]
    crowded = LoadReport(running_requests=2)
    assert numbers(policy, [Rank(0, load=crowded), Rank(1)], 2) == [1, 1]
    assert sorted(numbers(policy, [Rank(0), Rank(1)], 2)) == [0, 1]


def test_least_load_counts_tokens_not_requests():
    policy = load("least_load").prefill
    one_long, many_short = Rank(0, 4000, 1), Rank(1, 300, 10)
    assert numbers(policy, [one_long, many_short], 1) == [1]
