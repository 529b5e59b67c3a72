"""HTTP and gRPC beside each other: bound before ready, stopped together."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import weakref

import grpc
import httpx
import pytest

from cluster.fronts import banner, listen
from cluster.tasks import task_group
from core import presets
from core.config import RouterConfig
from core.errors import ConfigError, EngineError, PreflightError
from router.openai.app import make_app
from router.readiness import Readiness
from router.rpc.gen import antiphon_pb2 as pb, antiphon_pb2_grpc
from router.rpc.server import RpcFront, RpcServices
from tests.support.doors import make_door, services
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_streams import FakeStreams, chunk, says
from tests.support.rpc_calls import all_of, text_of

BOTH = RouterConfig(port=0, grpc_port=0)


async def _ready() -> Readiness:
    return Readiness(ready=True)


def _paused(more: asyncio.Event):
    def script(made):
        yield chunk(0, 65)
        while not more.is_set():
            yield chunk(0)
        yield from says("nd")(made)

    return script


class Router:
    """Both fronts over one door.

    In no circle of references: gRPC's servers do not take part in garbage collection, and one that
    stays keeps gRPC's thread running while the interpreter ends.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.more = asyncio.Event()  # streams pause after their first letter until it is set
        self.door = make_door(FakeStreams(_paused(self.more)))
        self.app = make_app(services(self.door))
        self.rpc = RpcFront(RpcServices(door=self.door, ready=_ready, members=list))
        self.ports: list[tuple[int, int | None]] = []

    async def listen(self, config: RouterConfig = BOTH, *, rpc: bool = True) -> None:
        front = self.rpc if rpc else None
        await listen(config, self.app, front, lambda *p: self.ports.append(p), self.stop)


def test_both_answer_once_ready_and_drain_together():
    async def main() -> None:
        router = Router()
        serving = asyncio.create_task(router.listen())
        await eventually(lambda: router.ports)
        ((http, rpc),) = router.ports
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}") as web,
            grpc.aio.insecure_channel(f"127.0.0.1:{rpc}") as channel,
        ):
            assert (await web.get("/health")).status_code == 200
            stream = antiphon_pb2_grpc.AntiphonStub(channel).Generate(pb.GenerateRequest(text="x"))
            assert (await stream.read()).choices[0].text == "A"
            assert router.door.running == 1
            router.stop.set()
            router.more.set()  # it ends within the grace
            messages = await all_of(stream)
            assert text_of(messages) == "nd"
            assert messages[-1].choices[-1].finish_reason == pb.FINISH_REASON_STOP
        await serving

    run_tidy(main)


def test_without_grpc_there_is_one_port():
    async def main() -> None:
        router = Router()
        serving = asyncio.create_task(router.listen(rpc=False))
        await eventually(lambda: router.ports)
        assert router.ports[0][1] is None
        router.stop.set()
        await serving

    run_tidy(main)


@pytest.mark.parametrize("key", ["port", "grpc_port"])
def test_a_port_taken_meanwhile_names_its_key(key):
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            config = RouterConfig(**{"port": 0, "grpc_port": 0, key: taken.getsockname()[1]})
            with pytest.raises(PreflightError, match=rf"router\.{key}="):
                await Router().listen(config)

    run_tidy(main)


def test_nothing_of_a_front_survives_its_end():
    """Nor the thread that gRPC runs as long as it has a server."""
    made: list[weakref.ref[RpcFront]] = []

    async def main() -> None:
        router = Router()
        made.append(weakref.ref(router.rpc))
        serving = asyncio.create_task(router.listen())
        await eventually(lambda: router.ports)
        router.stop.set()
        await serving

    run_tidy(main)
    gc.collect()
    assert made[0]() is None


async def group_that_fails_with(error: Exception) -> None:
    async with task_group() as tasks:
        tasks.create_task(asyncio.Event().wait())
        raise error


def test_an_error_the_operator_can_mend_comes_out_of_the_task_group_as_it_is():
    with pytest.raises(PreflightError, match="mend me"):
        asyncio.run(group_that_fails_with(PreflightError("mend me")))
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(group_that_fails_with(EngineError("ours")))
    assert caught.group_contains(EngineError)


def test_the_banner_names_both_ports():
    config = presets.read("cpu", ())
    assert "gRPC (antiphon.v1) on 127.0.0.1:9000" in banner(config, 8000, 9000)
    assert "gRPC" not in banner(config, 8000, None)


def test_a_first_call_as_the_banner_has_it_is_short_and_the_same_each_time():
    text = banner(presets.read("cpu", ()), 8000, 9000)
    sent = json.loads(text.partition("-d '")[2].partition("'")[0])
    assert (sent["temperature"], sent["max_tokens"]) == (0, 64)
    program = text.partition("from openai")[2]
    assert "temperature=0, max_tokens=64" in program
    assert "--ca" not in text


def test_one_port_cannot_serve_both():
    with pytest.raises(ConfigError, match="must differ"):
        presets.read("cpu", ("router.port=9000",))
    presets.read("cpu", ("router.port=9000", "router.grpc=false"))
    presets.read("cpu", ("router.port=0", "router.grpc_port=0"))
