"""Composition root: model, preflight, ranks, router, its fronts; run; stop in reverse order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI

from cluster import model_store, preflight
from cluster.fronts import banner, listen, stop_signals
from cluster.plan import Cpu, rank_specs, resolve_dtype, served_name
from cluster.status import StatusBoard
from core import env
from core.clock import RealClock
from core.config import ClusterConfig, RankSpec
from core.errors import OperatorError, PreflightError
from core.metrics import PrometheusSink
from core.rpc.client import Connector, SessionPace
from core.wire import RankInfo
from router.admission import Admission
from router.dispatch import Dispatcher, DispatchLimits
from router.frontdoor import FrontDoor
from router.openai.app import HttpServices, make_app
from router.policy.base import POLICIES, PolicyContext
from router.replicas import Member, Replicas
from router.rpc.server import RpcFront, RpcServices
from router.selftest import SelfTest
from router.text.chat import open_template
from router.text.request import ServedModel
from router.text.tokenizer import TOKENIZERS
from worker.architectures import read_spec
from worker.model_spec import ModelSpec

Say = Callable[[str], None]
Watch = Callable[[Replicas], Coroutine[Any, Any, None]]

# Mooncake logs one error and one warning whenever an engine starts, about nothing
HARMLESS = "Local segment descriptor not found|Logging before InitGoogleLogging"


class Cluster(Protocol):
    """Ranks that somebody runs: this process or Ray."""

    async def start(self, specs: Sequence[RankSpec]) -> list[RankInfo]:
        """Start every rank; returns when all can take requests. Raises OperatorError."""
        ...

    async def watch(self, on_members: Callable[[Sequence[RankInfo]], None]) -> None:
        """Report who is there, whenever that changes, until cancelled."""
        ...

    async def stop(self) -> None:
        """Stop what was started, however far ``start`` came."""
        ...


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of a router that ``serve`` runs."""

    app: FastAPI
    rpc: RpcFront | None  # None: switched off
    replicas: Replicas
    selftest: SelfTest


async def serve(config: ClusterConfig, say: Say) -> None:
    """Serve until cancelled (SIGINT, SIGTERM). Raises OperatorError when it cannot start.

    ``say`` gets a line for each step of starting and stopping.
    """
    started = RealClock().now()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    config = resolve_dtype(config, cpu())
    folder = model_store.resolve(config.model.source, say)
    for warning in preflight.check(config, folder):
        say(f"warning: {warning}")
    spec = read_spec(folder)
    specs = rank_specs(config, folder, spec.context_len, cpu())
    async with (
        ranks(config, specs, say) as (infos, watch),
        router(config, folder, spec, infos) as parts,
        task_group() as tasks,
    ):
        watcher = tasks.create_task(watch(parts.replicas))
        if problem := await _first_problem(parts.replicas, parts.selftest):
            raise PreflightError(f"the ranks started but do not serve: {problem}")
        say(f"self-test passed after {RealClock().now() - started:.1f} s")
        await listen(
            config.router,
            parts.app,
            parts.rpc,
            lambda *ports: say(banner(config, *ports)),
            stop_signals(),
        )
        watcher.cancel()
    say("stopped")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises the OperatorError of its body or of a task as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        mendable = errors.subgroup(OperatorError)
        if mendable is None:
            raise
        raise mendable.exceptions[0] from errors


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
    names = ", ".join(f"{s.rank} ({s.group.threads} threads)" for s in specs)
    say(f"starting {'in this process' if _local(config) else 'on Ray'}: {names}")
    cluster = _cluster(config)
    try:
        infos = await cluster.start(specs)

        async def watch(replicas: Replicas) -> None:
            await cluster.watch(lambda there: replicas.update(map(_member, there)))

        yield infos, watch
    finally:
        say("stopping ranks")
        await cluster.stop()


def _local(config: ClusterConfig) -> bool:
    return config.cluster.runtime == "local"


def _cluster(config: ClusterConfig) -> Cluster:
    """Imports the one that is asked for: torch and Ray take seconds."""
    if _local(config):
        from cluster.local import LocalCluster

        return LocalCluster()
    env.set_default("RAY_DEDUP_LOGS_SKIP_REGEX", HARMLESS)
    from cluster.ray_cluster import RayCluster

    return RayCluster(config.cluster)


@asynccontextmanager
async def router(
    config: ClusterConfig, folder: Path, spec: ModelSpec, infos: Sequence[RankInfo]
) -> AsyncIterator[Router]:
    """The front door over sessions that follow ``Replicas.update``."""
    clock, sink, settings = RealClock(), PrometheusSink(), config.router
    pace = SessionPace(rank_timeout_s=settings.rank_timeout_s)
    replicas = Replicas(Connector(secrets.token_hex(8), pace))
    context = PolicyContext(settings.cache_aware, clock, sink)
    policies = POLICIES.load(settings.policy)(context)
    limits = DispatchLimits(reroute_wait_s=settings.reroute_wait_s)
    dispatcher = Dispatcher(replicas, policies.prefill, policies.decode, limits=limits, sink=sink)
    model = ServedModel(
        name=served_name(config),
        aliases=config.model.aliases,
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
    rpc_services = RpcServices(
        door=door,
        ready=selftest.ready,
        members=replicas.members,
        body_limit_mib=settings.body_limit_mib,
    )
    rpc = RpcFront(rpc_services) if settings.grpc else None
    try:
        yield Router(make_app(services), rpc, replicas, selftest)
    finally:
        await replicas.close()


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
