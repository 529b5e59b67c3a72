"""Pools under traffic: prompts come in few pieces, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from bench.micro.churn import Churn, Traffic
from bench.micro.fragmentation import ExactCache, runs
from core.wire import Role
from worker.cache.prefix_cache import PrefixCache

TRAFFIC = Traffic(prompt=(50, 400), output=(10, 100), running=4)
PAGES = 4000


def pieces(role: Role, cache: type[PrefixCache]) -> list[list[int]]:
    churn = Churn(role, PAGES, TRAFFIC, cache=cache)
    churn.serve(60)
    served = churn.serve(60)
    churn.cache.check()
    return [runs(slots) for slots in served if len(slots)]


def test_runs():
    assert runs(np.array([4, 5, 6, 2, 9, 10], np.int32)) == [3, 1, 2]
    assert runs(np.array([3], np.int32)) == [1]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_prompts_come_in_few_pieces_however_long_the_pool_has_been_full(role):
    here = pieces(role, PrefixCache)
    assert np.mean([len(one) for one in here]) < 15
    assert np.mean([n for one in here for n in one]) > 16


def test_on_a_decode_rank_that_is_what_slack_is_for():
    here, exact = pieces(Role.DECODE, PrefixCache), pieces(Role.DECODE, ExactCache)
    assert sum(map(len, exact)) > 2 * sum(map(len, here))


def test_a_prompt_of_a_certain_length():
    churn = Churn(Role.DECODE, PAGES, TRAFFIC)
    churn.serve(20)
    assert len(churn.place(333)) == 333
