"""Composition root: model, preflight, ranks, router, its fronts; run; stop in reverse order."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI

from cluster import model_store, preflight
from cluster.fronts import banner, listen, stop_signals
from cluster.plan import Cpu, Plan, resolve_dtype, served_name
from cluster.status import StatusBoard
from cluster.supervisor import Hooks, Launcher, Supervisor
from core import env
from core.clock import RealClock
from core.config import ClusterConfig
from core.errors import OperatorError, RequestError
from core.metrics import PrometheusSink
from core.rpc.client import Connector, SessionPace
from core.wire import RankId
from router.admin import Operations, add_operations
from router.admission import Admission
from router.dispatch import Dispatcher, DispatchLimits, Routes
from router.frontdoor import FrontDoor
from router.openai.app import HttpServices, make_app
from router.policy.base import POLICIES, PolicyContext
from router.replicas import Replicas
from router.rpc.server import RpcFront, RpcServices
from router.selftest import SelfTest
from router.text.chat import open_template
from router.text.request import ServedModel
from router.text.tokenizer import TOKENIZERS
from worker.architectures import read_spec

Say = Callable[[str], None]

# Mooncake logs one error and one warning whenever an engine starts, about nothing
HARMLESS = "Local segment descriptor not found|Logging before InitGoogleLogging"


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
    plan = Plan(config, folder, read_spec(folder), cpu())
    async with router(plan) as parts, ranks(plan, parts, say) as supervisor:
        add_operations(parts.app, operations(plan, supervisor))
        await supervisor.all_serving()
        say(f"self-test passed after {RealClock().now() - started:.1f} s")
        await listen(
            config.router,
            parts.app,
            parts.rpc,
            lambda *ports: say(banner(config, *ports)),
            stop_signals(),
        )
    say("stopped")


@asynccontextmanager
async def ranks(plan: Plan, parts: Router, say: Say) -> AsyncIterator[Supervisor]:
    """Start every rank and keep it serving; stop them all at the end."""
    local = plan.config.cluster.runtime == "local"
    names = ", ".join(f"{s.rank} ({s.group.threads} threads)" for s in plan.ranks())
    say(f"starting {'in this process' if local else 'on Ray'}: {names}")
    hooks = Hooks(parts.replicas.update, parts.selftest.through, parts.replicas.idle)
    launcher = _launcher(plan.config)
    supervisor = Supervisor(launcher, plan.rank, hooks, RealClock(), plan.desired)
    try:
        await launcher.open()
        async with task_group() as tasks:
            running = tasks.create_task(supervisor.run())
            try:
                yield supervisor
            finally:
                say("stopping ranks")
                parts.replicas.update(())  # their sessions end by our hand, not by loss
                running.cancel()
    finally:
        await launcher.close()


def operations(plan: Plan, supervisor: Supervisor) -> Operations:
    """What the admin endpoints do."""

    def scale(replicas: Mapping[str, int]) -> dict[str, int]:
        supervisor.scale(replicas)
        return supervisor.desired

    def drain(rank: str) -> None:
        try:
            supervisor.drain(RankId.parse(rank))
        except ValueError:
            raise RequestError(
                f"{rank!r} is not a rank: give group/replica, e.g. decode/1", param="rank"
            ) from None

    def members() -> dict[str, Any]:  # opaque: JSON
        return {
            "model": msgspec.to_builtins(plan.config.model),
            "members": msgspec.to_builtins(supervisor.members),
        }

    return Operations(scale=scale, drain=drain, members=members)


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


def _launcher(config: ClusterConfig) -> Launcher:
    """Imports the one that is asked for: torch and Ray take seconds."""
    if config.cluster.runtime == "local":
        from cluster.local import LocalLauncher

        return LocalLauncher()
    env.set_default("RAY_DEDUP_LOGS_SKIP_REGEX", HARMLESS)
    env.set_default("GRPC_VERBOSITY", "ERROR")  # Ray forks beside our gRPC threads, harmlessly
    from cluster.ray_cluster import RayLauncher

    return RayLauncher(config.cluster)


@asynccontextmanager
async def router(plan: Plan) -> AsyncIterator[Router]:
    """The front door over sessions that follow ``Replicas.update``."""
    clock, sink, settings = RealClock(), PrometheusSink(), plan.config.router
    pace = SessionPace(rank_timeout_s=settings.rank_timeout_s)
    replicas = Replicas(Connector(secrets.token_hex(8), pace))
    context = PolicyContext(settings.cache_aware, clock, sink)
    policies = POLICIES.load(settings.policy)(context)
    limits = DispatchLimits(reroute_wait_s=settings.reroute_wait_s)
    dispatcher = Dispatcher(replicas, policies.prefill, policies.decode, limits=limits, sink=sink)
    model = ServedModel(
        name=served_name(plan.config),
        aliases=plan.config.model.aliases,
        context_len=plan.context_len,
        vocab_size=plan.model.vocab,
        eos_token_ids=frozenset(plan.model.eos_token_ids),
        created=int(clock.epoch()),
    )
    door = FrontDoor(
        dispatcher,
        TOKENIZERS.load(settings.tokenizer)(plan.folder),
        open_template(plan.folder, clock),
        model,
        admission=Admission(settings.queue_limit, clock),
        sink=sink,
        clock=clock,
    )

    def through(routes: Routes) -> Dispatcher:
        turns = POLICIES.load("round_robin")(context)
        once = DispatchLimits(reroute_wait_s=limits.reroute_wait_s, max_reroutes=0)
        return Dispatcher(routes, turns.prefill, turns.decode, limits=once)

    selftest = SelfTest(replicas, dispatcher, through)
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


def cpu() -> Cpu:
    """This machine's processors, as far as this process may use them."""
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags.update(line.split(":", 1)[1].split())
                break
    return Cpu.read(len(os.sched_getaffinity(0)), frozenset(flags))
