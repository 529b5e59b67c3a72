"""A whole rank, but for its model: what its host starts beside the step loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

import worker.host
from cluster.keeper import LeaseKeeper
from core.clock import RealClock
from core.config import LeaseConfig, RankSpec
from core.rpc.client import RankClient
from core.rpc.lease import lease_line
from tests.support.engines import make_unified
from tests.support.eventually import eventually, run_tidy
from tests.support.real_engine import rank_spec
from tests.support.requests import request
from worker.build import Built
from worker.host import RankHost


@pytest.fixture
def hangs(monkeypatch):
    """Ranks get an engine whose first step hangs until the event is set."""
    go_on = threading.Event()

    def build(*_: object) -> Built:
        engine = make_unified()
        launch = engine.runner.launch

        def hang(plan):
            go_on.wait(10)
            return launch(plan)

        engine.runner.launch = hang
        return Built(engine, 4, None)

    monkeypatch.setattr(worker.host, "build", build)
    yield go_on
    go_on.set()
    gc.unfreeze()


def spec(watchdog_s: float) -> RankSpec:
    plain = rank_spec(Path("/nowhere"))
    group = msgspec.structs.replace(plain.group, watchdog_s=watchdog_s)
    return msgspec.structs.replace(plain, group=group)


def watches() -> bool:
    """Whether a watchdog runs on this event loop."""
    return any("Watchdog.run" in repr(task.get_coro()) for task in asyncio.all_tasks())


def test_a_host_watches_over_its_steps(hangs, caplog):
    def stacks() -> list[str]:
        records = [r for r in caplog.records if r.name == "worker.watchdog"]
        return [r.getMessage() for r in records if r.levelno == logging.ERROR]

    async def main() -> None:
        host = await RankHost.start(spec(0.02), on_crash=lambda: None)
        client = await RankClient.connect(host.info.incarnation, "router")
        async with aclosing(client.stream(request("r", [1, 2, 3], 2))) as chunks:
            answer = asyncio.create_task(anext(chunks))
            await eventually(stacks)
            hangs.set()
            assert (await answer).rid == "r"
        await client.close()
        await host.stop()
        assert not watches()

    run_tidy(main)
    assert "go_on.wait(10)" in stacks()[0]


def test_a_host_that_is_told_not_to_does_not(hangs):
    async def main() -> None:
        host = await RankHost.start(spec(0), on_crash=lambda: None)
        assert not watches()
        await host.stop()

    run_tidy(main)


def test_a_host_passes_renewals_on_while_its_step_hangs(hangs):
    heard: list[str] = []

    async def main() -> None:
        host = await RankHost.start(spec(0), on_crash=lambda: None, on_renewal=heard.append)
        life = host.info.incarnation
        client = await RankClient.connect(life, "router")
        async with (
            lease_line(life, "s1") as renew,
            aclosing(client.stream(request("r", [1, 2, 3], 2))) as chunks,
        ):
            answer = asyncio.create_task(anext(chunks))
            healths = [await renew(5.0)]
            while healths[-1].busy_s < 0.01:
                healths.append(await renew(5.0))
            assert (await renew(5.0)).turn == healths[-1].turn
            hangs.set()
            await answer
        await client.close()
        await host.stop()

    run_tidy(main)
    assert set(heard) == {"s1"}


def test_a_supervisor_finds_a_host_whose_step_hangs_and_logs_where(hangs, caplog):
    limits = LeaseConfig(renew_s=0.01, lease_s=20.0, stuck_limit_s=0.1, orphan_s=30.0)

    async def main() -> None:
        host = await RankHost.start(spec(0), on_crash=lambda: None)
        client = await RankClient.connect(host.info.incarnation, "router")
        holding = asyncio.create_task(LeaseKeeper(limits, RealClock()).hold(host.info.incarnation))
        async with aclosing(client.stream(request("r", [1, 2, 3], 2))) as chunks:
            answer = asyncio.create_task(anext(chunks))
            assert (await holding).startswith("in one step for 0 s")
            hangs.set()
            await answer
        await client.close()
        await host.stop()

    run_tidy(main)
    (record,) = [r for r in caplog.records if r.name == "cluster.keeper"]
    assert "go_on.wait(10)" in record.getMessage()
