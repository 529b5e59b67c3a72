"""GET /admin/dump: the router's streams and sessions, and what each rank says of itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI

from cluster.dump import DumpBoard
from core.clock import VirtualClock
from core.dump import RankDump, ThreadStack
from core.errors import RankLost, RequestError
from core.wire import Incarnation, Role
from router.admin import add_dump
from router.live import LiveStreams
from router.openai.errors import install_error_handlers
from router.replicas import Replicas, Retry
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_ranks import Fleet


async def ask(life: Incarnation) -> RankDump:
    """The prefill rank answers, the decode rank does not."""
    if life.rank.group == "decode":
        raise RankLost("no answer")
    stack = ThreadStack(name="step-loop", ident=1, stack="  in a kernel")
    return RankDump(
        incarnation=life, pid=1, uptime_s=5.0, busy=None, stuck_steps=0, steps=(), threads=(stack,)
    )


@asynccontextmanager
async def board() -> AsyncIterator[DumpBoard]:
    fleet = Fleet()
    fleet.add(Role.PREFILL)
    member = fleet.add(Role.DECODE)
    fleet.down.add(member.incarnation.rank)
    replicas = Replicas(fleet.connect, retry=Retry(first_s=0.0, limit_s=0.0))
    replicas.update(fleet.members)
    await eventually(lambda: replicas.routable(Role.PREFILL))
    yield DumpBoard(LiveStreams(VirtualClock()), replicas, ask)
    await replicas.close()


def test_ranks_are_asked_whether_their_session_is_up_or_not():
    async def main() -> None:
        async with board() as it:
            dump = await it.dump()
        assert dump["streams"] == []
        assert [(s["rank"], s["up"]) for s in dump["sessions"]] == [
            ("prefill/0/0", True),
            ("decode/0/0", False),
        ]
        prefill, decode = dump["ranks"]
        assert prefill["dump"]["threads"][0]["stack"] == "  in a kernel"
        assert decode == {"rank": "decode/0/0", "problem": "no answer"}

    run_tidy(main)


def test_one_rank_can_be_asked_for_and_a_wrong_name_tells_the_right_ones():
    async def main() -> None:
        async with board() as it:
            (only,) = (await it.dump("prefill/0/0"))["ranks"]
            assert only["rank"] == "prefill/0/0"
            with pytest.raises(RequestError, match=r"there are prefill/0/0, decode/0/0"):
                await it.dump("decode/7/0")

    run_tidy(main)


def test_the_endpoint_hands_the_rank_on_and_answers_400_for_a_wrong_one():
    async def main() -> None:
        app = FastAPI()
        install_error_handlers(app)
        async with board() as it:
            add_dump(app, it.dump)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                everyone = (await client.get("/admin/dump")).json()
                assert [rank["rank"] for rank in everyone["ranks"]] == ["prefill/0/0", "decode/0/0"]
                one = (await client.get("/admin/dump", params={"rank": "decode/0/0"})).json()
                assert [rank["rank"] for rank in one["ranks"]] == ["decode/0/0"]
                wrong = await client.get("/admin/dump", params={"rank": "nobody"})
                assert wrong.status_code == 400
                assert wrong.json()["error"]["param"] == "rank"

    run_tidy(main)
