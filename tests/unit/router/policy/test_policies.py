from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from core.wire import LoadReport, RankId
from router.policy.base import POLICIES

PROMPT = np.arange(5, dtype=np.int32)


@dataclass
class Rank:
    number: int
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    load: LoadReport = field(default_factory=LoadReport)

    @property
    def rank(self) -> RankId:
        return RankId(group="decode", replica=self.number)


def numbers(policy, ranks, times):
    return [policy.choose(ranks, PROMPT).number for _ in range(times)]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_equal_ranks_get_equal_shares(name):
    policy = POLICIES.load(name)()
    ranks = [Rank(2), Rank(0), Rank(1)]
    assert Counter(numbers(policy, ranks, 9)) == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_ranks_may_come_and_go(name):
    policy = POLICIES.load(name)()
    assert numbers(policy, [Rank(0), Rank(1)], 1) == [0]
    assert numbers(policy, [Rank(3)], 2) == [3, 3]
    assert sorted(numbers(policy, [Rank(0), Rank(1), Rank(4)], 3)) == [0, 1, 4]


def test_round_robin_goes_on_after_the_last_one():
    policy = POLICIES.load("round_robin")()
    ranks = [Rank(0), Rank(1, outstanding_tokens=10_000), Rank(2)]
    assert numbers(policy, ranks, 4) == [0, 1, 2, 0]
    assert numbers(policy, [ranks[0], ranks[2]], 2) == [2, 0]


def test_least_load_prefers_our_own_bookings_then_the_report_then_turns():
    policy = POLICIES.load("least_load")()
    busy = LoadReport(waiting_tokens=900)
    assert numbers(policy, [Rank(0, 50), Rank(1, 49, load=busy)], 2) == [1, 1]
    assert numbers(policy, [Rank(0, 50, load=busy), Rank(1, 50)], 2) == [1, 1]
    crowded = LoadReport(running_requests=2)
    assert numbers(policy, [Rank(0, load=crowded), Rank(1)], 2) == [1, 1]
    assert sorted(numbers(policy, [Rank(0), Rank(1)], 2)) == [0, 1]


def test_least_load_counts_tokens_not_requests():
    policy = POLICIES.load("least_load")()
    one_long, many_short = Rank(0, 4000, 1), Rank(1, 300, 10)
    assert numbers(policy, [one_long, many_short], 1) == [1]
