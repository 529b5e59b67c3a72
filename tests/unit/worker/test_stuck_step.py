"""A step that hangs: what its rank still says, over real loopback gRPC, and how it goes on."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

import worker.loop
from core.clock import VirtualClock
from core.errors import RankLost
from core.lease import Health
from core.rpc.client import RankClient, SessionPace, ask_dump
from core.rpc.server import RankServer, ServerLimits
from tests.support.engines import make_unified
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_runner import FakeRunner, Ticket, generate
from tests.support.requests import request
from tests.support.wires import incarnation, rank_info
from worker.loop import StepLoop
from worker.plan import StepPlan, StepResult
from worker.watchdog import Watchdog

PROMPT = [1, 2, 3]
SOON_S = 10.0
QUICK = SessionPace(status_timeout_s=0.05, rank_timeout_s=SOON_S)


class Hanging:
    """A runner that stops in the middle of a step until it is let go."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.hangs = threading.Event()
        self.go_on = threading.Event()

    def launch(self, plan: StepPlan) -> Ticket:
        self.hangs.set()
        self.wait_for_a_kernel()
        return self.runner.launch(plan)

    def wait_for_a_kernel(self) -> None:
        self.go_on.wait(SOON_S)

    def collect(self, ticket: Ticket) -> StepResult:
        return self.runner.collect(ticket)


class Rank:
    """A step loop with a hanging runner behind a server."""

    def __init__(self, server: RankServer) -> None:
        self.clock = VirtualClock()
        engine = make_unified()
        self.runner = engine.runner = Hanging(engine.runner)
        self.life = incarnation("unified", endpoint=server.bind())
        self.loop = StepLoop(engine, rank_info(self.life), self.clock, server.deliver, lambda: None)
        self.dog = Watchdog(30.0, self.loop.recorder, self.loop.stack, self.loop.count_stuck)


@asynccontextmanager
async def rank(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rank]:
    monkeypatch.setattr(worker.loop, "IDLE_WAIT_S", 3600.0)
    server = RankServer(ServerLimits(queues_timeout_s=0.05))
    it = Rank(server)
    it.loop.start()
    await server.start(it.loop)
    try:
        yield it
    finally:
        it.runner.go_on.set()
        await server.stop(0.1)
        await asyncio.to_thread(it.loop.stop)
        gc.unfreeze()


async def collect(client: RankClient, rid: str) -> list[int]:
    async with aclosing(client.stream(request(rid, PROMPT, 3))) as chunks:
        return [token async for chunk in chunks for token in chunk.token_ids]


def test_a_rank_that_hangs_says_where_and_for_whom_and_then_goes_on(monkeypatch, caplog):
    async def main() -> None:
        async with rank(monkeypatch) as it:
            client = await RankClient.connect(it.life, "router", pace=QUICK)
            answer = asyncio.create_task(collect(client, "r"))
            await eventually(it.runner.hangs.is_set)
            it.clock.advance(31.0)
            with pytest.raises(RankLost, match="no status"):
                await client.status()

            dump = await ask_dump(it.life)
            assert dump.busy is not None
            assert (dump.busy.lap, dump.busy.step, dump.busy.rids) == ("launch", 1, ("r",))
            assert dump.busy.for_s == 31.0
            assert dump.queues is None
            assert dump.note
            (stack,) = [t.stack for t in dump.threads if t.name == "step-loop"]
            assert "wait_for_a_kernel" in stack

            health = it.loop.health()
            assert (health.step, health.busy_s) == (1, 31.0)
            assert health.doing.startswith("in 'launch' of step 1 with")

            it.dog.look()
            (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
            assert "of r; its thread is here" in record.getMessage()
            assert "wait_for_a_kernel" in record.getMessage()

            it.runner.go_on.set()
            assert await answer == generate(PROMPT, 3)
            it.dog.look()
            assert "goes on" in caplog.records[-1].getMessage()
            assert (await ask_dump(it.life)).stuck_steps == 1
            assert (await client.status()).load.stuck_steps == 1
            await client.close()

    run_tidy(main)


def test_a_rank_that_works_shows_its_last_steps_and_its_queues(monkeypatch):
    async def main() -> None:
        async with rank(monkeypatch) as it:
            it.runner.go_on.set()
            client = await RankClient.connect(it.life, "router", pace=QUICK)
            assert await collect(client, "r") == generate(PROMPT, 3)
            await eventually(lambda: it.loop.recorder.busy() is None)
            assert it.loop.health() == Health(step=3, turn=it.loop.recorder.at[1], busy_s=0.0)
            dump = await ask_dump(it.life)
            assert dump.busy is None
            assert dump.queues is not None
            assert dump.queues.sequences == ()
            assert [(s.step, s.extend_rows, s.decode_rows) for s in dump.steps] == [
                (1, 1, 0), (2, 0, 1), (3, 0, 1),
            ]  # fmt: skip
            assert list(dump.steps[0].laps) == [
                "events", "poll", "plan", "launch", "collect", "absorb", "report",
            ]  # fmt: skip
            await client.close()

    run_tidy(main)
