"""Composition root: model, preflight, ranks, router, HTTP; run; stop in reverse order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from cluster import model_store, preflight
from cluster.local import LocalCluster
from cluster.plan import Cpu, rank_specs, resolve_dtype, served_name
from cluster.ray_cluster import RayCluster
from cluster.status import StatusBoard
from core.clock import RealClock
from core.config import ClusterConfig, RankSpec
from core.errors import PreflightError
from core.metrics import PrometheusSink
from core.rpc.client import Connector, SessionPace
from core.wire import RankInfo
from router.admission import Admission
from router.dispatch import Dispatcher, DispatchLimits
from router.frontdoor import FrontDoor
from router.openai.app import HttpServices, make_app
from router.policy.base import POLICIES
from router.replicas import Member, Replicas
from router.selftest import SelfTest
from router.text.chat import open_template
from router.text.request import ServedModel
from router.text.tokenizer import TOKENIZERS
from worker.model_spec import ModelSpec, read_spec

Say = Callable[[str], None]
Watch = Callable[[Replicas], Coroutine[Any, Any, None]]


async def serve(config: ClusterConfig, say: Say) -> None:
    """Serve until cancelled (SIGINT, SIGTERM). Raises OperatorError when it cannot start.

    ``say`` gets a line for each step of starting and stopping.
    """
    started = RealClock().now()
    config = resolve_dtype(config, cpu())
    folder = model_store.resolve(config.model.source, say)
    for warning in preflight.check(config, folder):
        say(f"warning: {warning}")
    spec = read_spec(folder)
    specs = rank_specs(config, folder, spec.context_len, cpu())
    async with (
        ranks(config, specs, say) as (infos, watch),
        router(config, folder, spec, infos) as (app, replicas, selftest),
        asyncio.TaskGroup() as tasks,
    ):
        watcher = tasks.create_task(watch(replicas))
        if problem := await _first_problem(replicas, selftest):
            raise PreflightError(f"the ranks started but do not serve: {problem}")
        say(f"self-test passed after {RealClock().now() - started:.1f} s")
        await _listen(config, app, lambda port: say(banner(config, port)))
        watcher.cancel()
    say("stopped")


async def _first_problem(replicas: Replicas, selftest: SelfTest) -> str:
    """Wait for the sessions, then test; the problem in words, or nothing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(10):
            while not replicas.complete:
                await replicas.change().wait()
    return (await selftest.ready()).reason


@asynccontextmanager
async def ranks(
    config: ClusterConfig, specs: Sequence[RankSpec], say: Say
) -> AsyncIterator[tuple[list[RankInfo], Watch]]:
    """Start every rank, and stop it at the end. Yields their infos and the watcher of members."""
    local = config.cluster.runtime == "local"
    cluster: LocalCluster | RayCluster = (
        LocalCluster() if local else RayCluster(config.cluster, cpu().cores)
    )
    names = ", ".join(f"{s.rank} ({s.group.threads} threads)" for s in specs)
    say(f"starting {'in this process' if local else 'on Ray'}: {names}")
    try:
        infos = await cluster.start(specs)

        async def watch(replicas: Replicas) -> None:
            await cluster.watch(lambda there: replicas.update(map(_member, there)))

        yield infos, watch
    finally:
        say("stopping ranks")
        await cluster.stop()


@asynccontextmanager
async def router(
    config: ClusterConfig, folder: Path, spec: ModelSpec, infos: Sequence[RankInfo]
) -> AsyncIterator[tuple[FastAPI, Replicas, SelfTest]]:
    """The front door over sessions that follow ``Replicas.update``."""
    clock, sink, settings = RealClock(), PrometheusSink(), config.router
    pace = SessionPace(rank_timeout_s=settings.rank_timeout_s)
    replicas = Replicas(Connector(secrets.token_hex(8), pace))
    policy = POLICIES.load(settings.policy)
    limits = DispatchLimits(reroute_wait_s=settings.reroute_wait_s)
    dispatcher = Dispatcher(replicas, policy(), policy(), limits=limits, sink=sink)
    model = ServedModel(
        name=served_name(config),
        context_len=min(info.context_len for info in infos),
        vocab_size=spec.vocab,
        eos_token_ids=frozenset(spec.eos_token_ids),
        created=int(clock.epoch()),
    )
    door = FrontDoor(
        dispatcher,
        TOKENIZERS.load(settings.tokenizer)(folder),
        open_template(folder, clock),
        model,
        admission=Admission(settings.queue_limit, clock),
        sink=sink,
        clock=clock,
    )
    selftest = SelfTest(replicas, dispatcher)
    board = StatusBoard(model.name, replicas, selftest, sink)
    services = HttpServices(
        door=door,
        ready=selftest.ready,
        status=board.status,
        metrics=board.metrics,
        version=version("antiphon"),
        body_limit_mib=settings.body_limit_mib,
    )
    try:
        yield make_app(services), replicas, selftest
    finally:
        await replicas.close()


class _HttpServer(uvicorn.Server):
    """Leaves signals to whoever runs ``serve``."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _listen(config: ClusterConfig, app: FastAPI, ready: Callable[[int], None]) -> None:
    """Serve HTTP until SIGINT or SIGTERM; live streams get a moment to end."""
    try:
        sock = socket.create_server((config.router.host, config.router.port))
    except OSError as error:
        raise PreflightError(
            f"cannot listen on {config.router.host}:{config.router.port}: {error.strerror};"
            " choose another with router.port=..."
        ) from error
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    server = _HttpServer(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    ready(sock.getsockname()[1])
    await server.serve(sockets=[sock])


def banner(config: ClusterConfig, port: int) -> str:
    """The ready line, and what to try next."""
    url = f"http://{config.router.host}:{port}"
    name = served_name(config)
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    return f"""ready: {name} on {url}

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{name}", "messages": {messages}}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  answer = client.chat.completions.create(model="{name}", messages={messages})
  print(answer.choices[0].message.content)

  antiphon status --url {url}
  Ctrl-C stops everything."""


def _member(info: RankInfo) -> Member:
    return Member(info.incarnation, info.role)


def cpu() -> Cpu:
    """This machine's processors, as far as this process may use them."""
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags.update(line.split(":", 1)[1].split())
                break
    return Cpu.read(len(os.sched_getaffinity(0)), frozenset(flags))
