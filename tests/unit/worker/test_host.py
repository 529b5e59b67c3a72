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
from core.config import RankSpec
from core.rpc.client import RankClient
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
