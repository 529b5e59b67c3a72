"""Composition root: model, preflight, ranks, router, its fronts; run; stop in reverse order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from cluster import model_store, preflight
from cluster.fronts import banner, listen, stop_signals
from cluster.join import Announced
from cluster.keeper import LeaseKeeper
from cluster.plan import Cpu, Plan, resolve_dtype, resolve_paths, served_model
from cluster.routing import Router, router
from cluster.supervisor import Hooks, Launcher, Supervisor
from cluster.tasks import task_group
from core import env
from core.clock import RealClock
from core.config import ClusterConfig
from core.errors import RequestError
from core.wire import RankId
from router.admin import Operations, add_operations
from router.echo import quoted
from worker.architectures import read_spec

Say = Callable[[str], None]

# Mooncake logs one error and one warning whenever an engine starts, about nothing
HARMLESS = "Local segment descriptor not found|Logging before InitGoogleLogging"

_WHERE = {"ray": "on Ray", "process": "as processes", "local": "in this process"}


async def serve(config: ClusterConfig, say: Say) -> None:
    """Serve until stopped (SIGINT, SIGTERM); while it starts, both cancel it.

    Raises OperatorError when it cannot start. ``say`` gets a line for each step of starting and
    stopping.
    """
    started = RealClock().now()
    if task := asyncio.current_task():  # for SIGINT asyncio.run does so, unless it is ignored
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    config = resolve_paths(resolve_dtype(config, cpu()), Path.cwd())
    folder = model_store.resolve(config.model.source, say)
    for warning in preflight.check(config, folder):
        say(f"warning: {warning}")
    plan = Plan(config, folder, read_spec(folder), cpu())
    model = served_model(plan, int(RealClock().epoch()))
    async with (
        opened(plan, say) as launcher,
        router(config.router, model, folder, config.tracing) as parts,
        ranks(plan, parts, launcher, say) as supervisor,
    ):
        add_operations(parts.app, operations(plan, supervisor))
        await supervisor.all_serving()
        say(f"self-test passed after {RealClock().now() - started:.1f} s")
        await listen(
            config.router,
            parts.app,
            parts.rpc,
            lambda *ports: say(banner(config, *ports)),
            stop_signals(),
            parts.door.abort_all,
        )
    say("stopped")


@asynccontextmanager
async def opened(plan: Plan, say: Say) -> AsyncIterator[Launcher]:
    """Whoever runs the ranks, ready to start some.

    Before anything of gRPC: Ray forks its processes, and one that is forked beside gRPC's threads
    may abort on a lock that they held.
    """
    names = ", ".join(f"{s.rank} ({s.group.threads} threads)" for s in plan.ranks())
    say(f"starting {_WHERE[plan.config.cluster.runtime]}: {names}")
    launcher = _launcher(plan.config)
    try:
        await launcher.open()
        yield launcher
    finally:
        await launcher.close()


@asynccontextmanager
async def ranks(
    plan: Plan, parts: Router, launcher: Launcher, say: Say
) -> AsyncIterator[Supervisor]:
    """Start every rank and keep it serving; stop them all at the end."""
    hooks = Hooks(parts.replicas.update, parts.selftest.through, parts.replicas.idle)
    clock, runtime = RealClock(), plan.config.cluster
    keeper = LeaseKeeper(runtime.lease, clock)
    hold = None if runtime.runtime == "local" else keeper.hold  # its ranks are in this process
    supervisor = Supervisor(launcher, plan.rank, hooks, clock, plan.desired, hold=hold)
    parts.status.supervised(lambda: supervisor.lives(keeper.doubt))
    async with task_group() as tasks:
        running = tasks.create_task(supervisor.run())
        try:
            yield supervisor
        finally:
            say("stopping ranks")
            parts.replicas.update(())  # their sessions end by our hand, not by loss
            running.cancel()


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
                f"{quoted(rank)} is not a rank: give group/replica, e.g. decode/1", param="rank"
            ) from None

    def members() -> dict[str, Any]:  # opaque: JSON
        announced = Announced(
            model=plan.config.model, context_len=plan.context_len, members=supervisor.members
        )
        body: dict[str, Any] = msgspec.to_builtins(announced)
        return body

    return Operations(scale=scale, drain=drain, members=members)


def _launcher(config: ClusterConfig) -> Launcher:
    """Imports the one that is asked for: torch and Ray take seconds."""
    if config.cluster.runtime == "local":
        from cluster.local import LocalLauncher

        return LocalLauncher()
    if config.cluster.runtime == "process":
        from cluster.process_launcher import ProcessLauncher

        return ProcessLauncher(config.cluster)
    env.set_default("RAY_DEDUP_LOGS_SKIP_REGEX", HARMLESS)
    env.set_default("RAY_DEDUP_LOGS_ALLOW_REGEX", "rid")  # each record about a request counts
    from cluster.ray_cluster import RayLauncher

    return RayLauncher(config.cluster)


def cpu() -> Cpu:
    """This machine's processors, as far as this process may use them."""
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags.update(line.split(":", 1)[1].split())
                break
    return Cpu.read(len(os.sched_getaffinity(0)), frozenset(flags))
