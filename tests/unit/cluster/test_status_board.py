"""What GET /status and /metrics say of the ranks behind a router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from cluster.dump import Ask
from cluster.reconcile import Life, Phase
from cluster.status import StatusBoard, serving
from core.dump import Busy, RankDump
from core.errors import RankLost
from core.handoffs import HandoffCount
from core.metrics import PrometheusSink
from core.wire import FinishReason, Incarnation, LoadReport, RankId, RankStatus, Role
from router.readiness import Readiness
from router.replicas import Replicas, Retry
from router.selftest import SelfTest
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_ranks import FakeClient, Fleet
from tests.support.fake_streams import FakeStreams, chunk
from tests.support.wires import incarnation, rank_info


async def nobody(life: Incarnation) -> RankDump:
    raise RankLost("no dump")


@asynccontextmanager
async def board(fleet: Fleet, up: Callable[[Replicas], object], ask: Ask = nobody) -> AsyncIterator:
    replicas = Replicas(fleet.connect, retry=Retry(first_s=0.0, limit_s=0.0))
    replicas.update(fleet.members)
    await eventually(lambda: up(replicas))
    streams = FakeStreams(lambda _: [chunk(0, 1, 2, finish=FinishReason.LENGTH)])
    selftest = SelfTest(replicas, streams, lambda _: streams)
    yield StatusBoard("tiny", replicas, selftest, PrometheusSink(), ask), replicas
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


def test_a_rank_that_does_not_answer_is_stuck_when_it_is_in_a_long_step():
    def busy(for_s: float) -> Busy:
        return Busy(
            turn=1, for_s=for_s, lap="launch", step=9,
            extend_rows=0, decode_rows=1, tokens=1, rids=("r",),
        )  # fmt: skip

    async def ask(life: Incarnation) -> RankDump:
        doing = busy(34.0) if life.rank.group == "prefill" else busy(0.2)
        return RankDump(
            incarnation=life, pid=1, uptime_s=60.0, busy=doing, stuck_steps=1, steps=(), threads=()
        )

    async def main() -> None:
        fleet = a_pair()
        fleet.down |= {member.incarnation.rank for member in fleet.members}
        async with board(fleet, lambda _: fleet.attempts >= 2, ask) as (status_board, _):
            decode, prefill = (await status_board.status())["ranks"]
        assert decode["state"] == "no session"
        assert (prefill["state"], prefill["stuck_s"]) == ("stuck", 34.0)
        assert prefill["reason"].startswith("in 'launch' of step 9 with")

    run_tidy(main)


def test_what_the_supervisor_knows_is_shown_of_every_rank_it_runs():
    async def main() -> None:
        fleet = a_pair()
        decode, prefill = fleet.members[1].incarnation.rank, fleet.members[0].incarnation.rank
        fleet.down.add(decode)
        other = RankId(group="decode", replica=1)
        crashed = Life(other, Phase.RESTING, 5, "ended by SIGKILL", 51.2, "")
        async with board(fleet, lambda r: r.problem(decode)) as (status_board, _):
            (plain, _) = (await status_board.status())["ranks"]
            assert plain["life"] is None
            status_board.supervised(
                lambda: (
                    Life(decode, Phase.SERVING, 1, "an old crash", None, "no answer for 4 s"),
                    Life(prefill, Phase.SERVING, 0, "", None, ""),
                    crashed,
                )
            )
            silent, away, up = (await status_board.status())["ranks"]
        assert (plain["state"], plain["reason"]) == ("no session", "nobody there")
        assert (silent["state"], silent["reason"]) == ("no session", "no answer for 4 s")
        assert (up["state"], up["life"]["crashes"]) == ("up", 0)
        assert (away["rank"], away["state"], away["role"]) == ("decode/1/0", "resting", "decode")
        assert away["life"] == {
            "phase": "resting", "crashes": 5, "problem": "ended by SIGKILL", "retry_s": 51.2,
        }  # fmt: skip

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


def test_how_requests_are_served():
    def said(*roles: Role, reason: str = "", transport: str = "mooncake tcp") -> str:
        infos = [
            replace(
                rank_info(incarnation(role.value), role),
                transport="" if role is Role.UNIFIED else transport,
            )
            for role in roles
        ]
        return serving(infos, Readiness(ready=not reason, reason=reason))

    pair = (Role.PREFILL, Role.DECODE)
    assert said(*pair) == "prefill/decode over mooncake tcp"
    assert said(Role.UNIFIED).startswith("unified")
    assert said(Role.PREFILL) == "prefill/decode, not in effect: no decode rank is there"
    assert said(*pair, reason="KV geometry differs").endswith("not in effect: KV geometry differs")


def test_counters_of_handoffs_come_from_the_latest_report():
    async def main() -> None:
        async with board(a_pair(), lambda r: r.complete) as (status_board, replicas):
            (decode,) = replicas.routable(Role.DECODE)
            count = HandoffCount(fences=2)
            decode.client.transfers = count.report(held_pages=3)
            page = status_board.metrics().decode()
            assert 'antiphon_handoff_fences_total{rank="decode/0/0",role="decode"} 2.0' in page
            assert 'handoff_fences_total{rank="prefill' not in page

    run_tidy(main)
