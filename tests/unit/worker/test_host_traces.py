"""A rank that ends takes leave of the requests it had: their spans end with the reason."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

import worker.host
from core.config import RankSpec, TracingConfig
from core.errors import RankLost
from core.rpc.client import RankClient
from core.tracing.file import read
from tests.support.engines import make_unified
from tests.support.eventually import eventually, run_tidy
from tests.support.real_engine import rank_spec
from tests.support.requests import request
from tests.support.spans import CALLER, named
from worker.build import Built
from worker.engine import Engine
from worker.host import RankHost

TRACED = msgspec.structs.replace(request("r", [1, 2, 3], 90), trace=CALLER)


@pytest.fixture
def engines(monkeypatch):
    """The engines that ranks get: without a model."""
    made: list[Engine] = []

    def build(*_: object) -> Built:
        made.append(make_unified())
        return Built(made[-1], 4, None)

    monkeypatch.setattr(worker.host, "build", build)
    yield made
    gc.unfreeze()


def spec(path: Path) -> RankSpec:
    tracing = TracingConfig(file=str(path))
    return msgspec.structs.replace(rank_spec(Path("/nowhere")), tracing=tracing)


def test_of_a_rank_that_is_stopped(engines, tmp_path):
    path = tmp_path / "spans"

    async def main() -> None:
        host = await RankHost.start(spec(path), on_crash=lambda: None)
        engine = engines[0]
        engine.runner.launch = slow(engine)
        client = await RankClient.connect(host.info.incarnation, "router")
        async with aclosing(client.stream(TRACED)) as chunks:
            await anext(chunks)
            await host.stop()
        await client.close()

    run_tidy(main)
    spans = read(path.read_text())
    assert named(spans, "decode").error == "the rank was stopped"
    assert named(spans, "prefill").error == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_of_a_rank_whose_step_loop_dies(engines, tmp_path):
    path = tmp_path / "spans"
    seen: list[str] = []

    def crashed() -> None:
        seen.extend(span.error for span in read(path.read_text()))

    async def main() -> None:
        host = await RankHost.start(spec(path), on_crash=crashed)
        client = await RankClient.connect(host.info.incarnation, "router")
        engines[0].runner.launch = broken
        stream = client.stream(TRACED)
        first = asyncio.ensure_future(anext(stream))
        await eventually(lambda: seen)
        await host.stop()
        with pytest.raises(RankLost):
            await first
        await client.close()

    run_tidy(main)
    assert seen == ["the step loop of the rank died"], "before the process may end"


def slow(engine: Engine):
    """A step takes a while, so that the request is still there when its rank is told to stop."""
    launch, never = engine.runner.launch, threading.Event()

    def launched(plan):
        never.wait(0.01)
        return launch(plan)

    return launched


def broken(_: object) -> None:
    raise ZeroDivisionError("a defect")
