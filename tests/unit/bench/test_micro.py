"""The micro benchmarks run and print tables, in miniature."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from bench.micro import radix, sampler, scheduler, stream
from bench.micro.timing import Times


def test_times_are_the_least_the_quartile_and_the_median():
    times = Times.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert times == Times(1.0, 2.0, 3.0)
    assert times.cells(1e-3) == "1e+03 | 2e+03 | 3e+03"


def test_the_tree_has_the_nodes_that_were_asked_for():
    conversations = radix.Conversations(400)
    conversations.tree.check()
    assert 400 <= sum(1 for _ in conversations.tree.nodes()) <= 400 + radix.SYSTEMS
    for _, prepare in conversations.operations():
        prepare()()
    conversations.tree.check()


@pytest.mark.parametrize("lines", [lambda: radix.table(200, 2), lambda: scheduler.order_table(50)])
def test_tables_have_equally_many_cells_in_every_row(lines):
    rows = [line for part in lines() for line in part.splitlines() if line.startswith("|")]
    assert len(rows) > 3
    assert all(a.count("|") == b.count("|") for a, b in pairwise(rows))


def test_a_router_streams_from_a_rank_without_a_model():
    async def rows() -> list[str]:
        return [line async for line in stream.table(2, 0.001, 1) if line.startswith("| /v1/")]

    completions, chat = asyncio.run(rows())
    assert all(float(cell) > 0 for cell in (completions + chat).split("|") if "." in cell)


def test_cases_of_the_sampler_differ_in_what_they_ask_for():
    rows = [case.rows(2, 1000) for case in sampler.CASES]
    assert len(
        {
            repr(pair[0].params) + str(case.peaked)
            for pair, case in zip(rows, sampler.CASES, strict=True)
        }
    ) == len(sampler.CASES)
    peaked = next(case for case in sampler.CASES if case.peaked).logits(1, 1000)
    assert float(peaked.softmax(-1).max()) > 0.3
