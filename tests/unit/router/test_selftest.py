"""Readiness: shown by a request, remembered for as long as the sessions stay the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_fields

from core.errors import Unavailable
from core.wire import ErrorKind, FinishReason, RankId, Role, TokenChunk, TokenLogprob
from router.dispatch import Routes
from router.replicas import MemberState, Replicas, Retry
from router.selftest import NOT_FINITE, PROMPT, SelfTest
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_ranks import Fleet
from tests.support.fake_streams import HANG, FakeStreams, chunk, failure

TWO_TOKENS = [chunk(0, 5), chunk(1, 6, finish=FinishReason.LENGTH)]


def scored(*logprobs: float) -> list[TokenChunk]:
    """The same, with the log-probability of each token."""
    return [
        replace_fields(each, logprobs=(TokenLogprob(logprob=logprob),))
        for each, logprob in zip(TWO_TOKENS, logprobs, strict=True)
    ]


@asynccontextmanager
async def sessions(fleet: Fleet) -> AsyncIterator[Replicas]:
    replicas = Replicas(fleet.connect, retry=Retry(first_s=0.0, limit_s=0.0))
    replicas.update(fleet.members)
    reachable = [m for m in fleet.members if m.incarnation.rank not in fleet.down]
    await eventually(lambda: len(fleet.live) == len(reachable))
    yield replicas
    await replicas.close()


def a_pair() -> Fleet:
    fleet = Fleet()
    fleet.add(Role.PREFILL)
    fleet.add(Role.DECODE)
    return fleet


def make_selftest(replicas: Replicas, streams: FakeStreams, timeout_s: float = 10.0) -> SelfTest:
    return SelfTest(replicas, streams, lambda _: streams, timeout_s)


def test_two_tokens_make_a_cluster_ready_and_the_test_is_not_repeated():
    async def main() -> None:
        streams = FakeStreams(lambda _: TWO_TOKENS)
        async with sessions(a_pair()) as replicas:
            selftest = make_selftest(replicas, streams)
            for _ in range(3):
                readiness = await selftest.ready()
                assert (readiness.ready, readiness.reason) == (True, "")
        (call,) = streams.calls
        assert call.token_ids == list(PROMPT)
        assert call.params.max_new_tokens == 2
        assert call.params.temperature == 0
        assert call.params.ignore_eos
        assert call.params.logprobs
        assert call.closed

    run_tidy(main)


def test_a_change_of_sessions_asks_for_another_test():
    async def main() -> None:
        fleet, streams = a_pair(), FakeStreams(lambda _: TWO_TOKENS)
        async with sessions(fleet) as replicas:
            selftest = make_selftest(replicas, streams)
            assert (await selftest.ready()).ready
            fleet.add(Role.DECODE, nonce="another life")
            replicas.update(fleet.members)
            await eventually(lambda: replicas.complete)
            assert (await selftest.ready()).ready
        assert len(streams.calls) == 2

    run_tidy(main)


def test_without_a_whole_set_of_ranks_nothing_is_tried():
    async def main() -> None:
        streams = FakeStreams(lambda _: TWO_TOKENS)
        async with sessions(Fleet()) as replicas:
            readiness = await make_selftest(replicas, streams).ready()
            assert not readiness.ready
            assert readiness.reason == "no prefill and no decode worker is there"
        fleet = Fleet()
        fleet.add(Role.DECODE)
        async with sessions(fleet) as replicas:
            reason = (await make_selftest(replicas, streams).ready()).reason
            assert reason == "no prefill worker is there"
        fleet = a_pair()
        fleet.down.add(fleet.members[0].incarnation.rank)
        async with sessions(fleet) as replicas:
            reason = (await make_selftest(replicas, streams).ready()).reason
            assert reason == "no session yet with prefill/0/0"
        assert not streams.calls

    run_tidy(main)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([failure(ErrorKind.INTERNAL, "the model is broken")], "the model is broken"),
        ([Unavailable("nobody can take it")], "nobody can take it"),
        (scored(math.nan, -1.0), NOT_FINITE),
        (scored(-1.0, -math.inf), NOT_FINITE),
        ([chunk(0, 5)], "the self-test's stream ended early"),
        ([chunk(0, 5, finish=FinishReason.LENGTH)], "the self-test's stream ended early"),
        ([chunk(0, 5), HANG], "the self-test did not answer within 0.05 s"),
    ],
)
def test_a_failed_test_says_why_and_is_tried_again(script, reason):
    async def main() -> None:
        scripts = [script, TWO_TOKENS]
        streams = FakeStreams(lambda _: scripts.pop(0))
        async with sessions(a_pair()) as replicas:
            selftest = make_selftest(replicas, streams, timeout_s=0.05)
            first, second = await selftest.ready(), await selftest.ready()
        assert (first.ready, first.reason) == (False, reason)
        assert second.ready
        assert all(call.closed for call in streams.calls)

    run_tidy(main)


def test_everybody_is_told_less_than_operators_are(caplog):
    """But how two ranks differ: nothing of that names a machine."""
    differs = "decode/0/0@10.0.0.7:5 said: KV geometry differs: dtype is 'a', 'b'"
    words = ["the link to 10.0.0.7:5 ended", "the link to 10.0.0.7:5 ended", differs]

    async def main() -> None:
        streams = FakeStreams(lambda _: [failure(ErrorKind.UNAVAILABLE, words.pop(0))])
        async with sessions(Fleet()) as replicas:
            assert (await make_selftest(replicas, streams).ready()).told == (
                "not every worker is there"
            )
        async with sessions(a_pair()) as replicas:
            selftest = make_selftest(replicas, streams)
            seen = [await selftest.ready() for _ in range(3)]
        assert [r.told for r in seen] == [
            "the self-test failed",
            "the self-test failed",
            "the self-test failed: KV geometry differs: dtype is 'a', 'b'",
        ]
        assert seen[2].reason == differs

    run_tidy(main)
    said = [r.getMessage() for r in caplog.records if r.name == "router.selftest"]
    assert said == ["not ready: the link to 10.0.0.7:5 ended", f"not ready: {differs}"]


def test_a_joining_rank_is_tested_with_a_serving_partner_and_nobody_else():
    async def main() -> None:
        fleet, streams = a_pair(), FakeStreams(lambda _: TWO_TOKENS)
        joining = fleet.add(Role.DECODE, 1)
        fleet.members[-1] = replace(joining, state=MemberState.JOINING)
        offered: list[Routes] = []

        def dispatch(routes: Routes) -> FakeStreams:
            offered.append(routes)
            return streams

        async with sessions(fleet) as replicas:
            selftest = SelfTest(replicas, FakeStreams(lambda _: []), dispatch)
            assert await selftest.through(joining.incarnation.rank) == ""
            (routes,) = offered
            for role, replica in ((Role.PREFILL, 0), (Role.DECODE, 1)):
                (only,) = routes.routable(role, frozenset())
                assert only.rank == RankId(group=role.value, replica=replica)
        assert len(streams.calls) == 1

    run_tidy(main)


def test_a_joining_rank_waits_for_a_partner():
    async def main() -> None:
        fleet, streams = Fleet(), FakeStreams(lambda _: [failure(ErrorKind.INTERNAL, "broken")])
        joining = fleet.add(Role.PREFILL)
        async with sessions(fleet) as replicas:
            selftest = make_selftest(replicas, streams)
            test = asyncio.create_task(selftest.through(joining.incarnation.rank))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not streams.calls
            fleet.add(Role.DECODE)
            replicas.update(fleet.members)
            assert await test == "broken"

    run_tidy(main)
