"""What GET /status and /metrics say of the ranks behind a router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster.status import StatusBoard
from core.errors import RankLost
from core.metrics import PrometheusSink
from core.wire import FinishReason, LoadReport, RankStatus, Role
from router.replicas import Replicas, Retry
from router.selftest import SelfTest
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_ranks import FakeClient, Fleet
from tests.support.fake_streams import FakeStreams, chunk


@asynccontextmanager
async def board(fleet: Fleet, up: Callable[[Replicas], object]) -> AsyncIterator:
    replicas = Replicas(fleet.connect, retry=Retry(first_s=0.0, limit_s=0.0))
    replicas.update(fleet.members)
    await eventually(lambda: up(replicas))
    streams = FakeStreams(lambda _: [chunk(0, 1, 2, finish=FinishReason.LENGTH)])
    selftest = SelfTest(replicas, streams, lambda _: streams)
    yield StatusBoard("tiny", replicas, selftest, PrometheusSink()), replicas
    await replicas.close()


def a_pair() -> Fleet:
    fleet = Fleet()
    fleet.add(Role.PREFILL)
    fleet.add(Role.DECODE)
    return fleet


def test_a_ready_cluster_with_all_that_its_ranks_say():
    async def main() -> None:
        async with board(a_pair(), lambda r: r.complete) as (status_board, _):
            status = await status_board.status()
        assert (status["model"], status["ready"], status["reason"]) == ("tiny", True, "")
        decode, prefill = status["ranks"]  # by name
        assert (decode["rank"], decode["role"], decode["state"]) == ("decode/0/0", "decode", "up")
        assert prefill["rank"] == "prefill/0/0"
        assert decode["pages"] == {"total": 64, "free": 60, "cached": 3, "owned": 1}
        assert decode["handoffs"] == {"sending": 2}
        assert decode["outstanding"] == 0

    run_tidy(main)


def test_ranks_without_a_session_and_ranks_that_are_lost_meanwhile():
    class Silent(FakeClient):
        async def status(self) -> RankStatus:
            raise RankLost("no answer")

    async def main() -> None:
        fleet = a_pair()
        fleet.down.add(fleet.members[0].incarnation.rank)
        async with board(fleet, lambda r: r.routable(Role.DECODE)) as (status_board, _):
            fleet.client(Role.DECODE).__class__ = Silent
            status = await status_board.status()
        assert not status["ready"]
        assert "prefill/0/0" in status["reason"]
        assert [rank["state"] for rank in status["ranks"]] == ["lost", "no session"]
        assert status["ranks"][0]["reason"] == "no answer"

    run_tidy(main)


def test_metrics_show_each_live_rank_and_forget_those_that_left():
    async def main() -> None:
        fleet = a_pair()
        async with board(fleet, lambda r: r.complete) as (status_board, replicas):
            fleet.client(Role.DECODE).load = LoadReport(waiting_requests=3)
            page = status_board.metrics().decode()
            assert 'waiting_requests{rank="decode/0/0",role="decode"} 3.0' in page
            assert 'rank="prefill/0/0"' in page
            replicas.update(fleet.members[1:])
            page = status_board.metrics().decode()
            assert 'rank="decode/0/0"' in page
            assert 'rank="prefill/0/0"' not in page

    run_tidy(main)
