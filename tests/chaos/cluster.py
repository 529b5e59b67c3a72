"""The cluster under torment: supervisor and first router in this process, every rank its own.

It offers what faults need (pids, links, held writes) and what checks need (dumps, statuses).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec

from cluster import model_store, reconcile
from cluster.fronts import listen
from cluster.keeper import LeaseKeeper
from cluster.plan import Plan, served_model
from cluster.process_launcher import ProcessLauncher
from cluster.reconcile import Phase as Life
from cluster.routing import Router, router
from cluster.serve import cpu, operations
from cluster.supervisor import Hooks, Supervisor
from core import presets
from core.clock import Clock, RealClock
from core.config import RankSpec
from core.dump import RankDump
from core.errors import RankLost
from core.rpc.client import ask_dump
from core.wire import Incarnation, RankId, RankInfo, RankStatus
from router.admin import add_operations
from router.replicas import Replica
from tests.chaos import descriptors
from tests.chaos.hosts import Hosts
from tests.chaos.rank import Fault, port_file
from tests.support.eventually import eventually
from tests.support.served import Served
from worker.architectures import read_spec

REPLICAS = 2  # of each role
MAX_RUNNING = 16
QUEUE_LIMIT = 64
LEASE_S = 14  # a rank that is away for a while is not replaced
HEALED_S = 4.0  # a rank that has served for so long is started at once when it dies again
RANK_CONTEXT = 2048  # tokens; the routers let through more, which ranks then refuse
REROUTES = "antiphon_reroutes_total"
RANKS = tuple(RankId(group=g, replica=r) for g in ("prefill", "decode") for r in range(REPLICAS))
SETTINGS = (
    "model.source=tiny-moe",
    "model.dtype=float32",  # a moved stream keeps its tokens to the last bit
    f"model.context_len={RANK_CONTEXT}",
    "router.port=0",
    "router.grpc_port=0",
    f"router.queue_limit={QUEUE_LIMIT}",
    "disagg.claim_timeout_s=15",
    "disagg.checksum=all",
    "cluster.runtime=process",
    f"cluster.lease.lease_s={LEASE_S}",
    "cluster.lease.orphan_s=60",
    "cluster.log_level=error",
    *(
        f"{group}.{setting}"
        for group in ("prefill", "decode")
        for setting in (
            f"replicas={REPLICAS}",
            "threads=1",
            "kv_tokens=8192",  # four contexts: pages find new owners soon
            "step_tokens=64",  # a long prompt takes many steps
            f"max_running={MAX_RUNNING}",
        )
    ),
)


def host_name(rank: RankId) -> str:
    return f"{rank.group}-{rank.replica}"


@dataclass
class Cluster:
    """Made by ``running``."""

    supervisor: Supervisor
    parts: Router
    hosts: Hosts
    controls: Path
    ports: tuple[int, int]  # of HTTP and gRPC
    clock: Clock = field(default_factory=RealClock)
    frozen: set[RankId] = field(default_factory=set)  # stopped or cut off by us

    # --- looking --------------------------------------------------------------------------------

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports[1]}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def session(self, rank: RankId) -> Replica | None:
        """This router's session with a rank, while it is up."""
        for member, replica in self.parts.replicas.members():
            if member.incarnation.rank == rank and replica is not None and replica.client.alive:
                return replica
        return None

    def info(self, rank: RankId) -> RankInfo:
        replica = self.session(rank)
        assert replica is not None, rank
        return replica.client.info

    @property
    def serving(self) -> bool:
        """All ranks are up again, and tested."""
        states = self.supervisor.states()
        return all(s.phase is Life.SERVING for s in states) and all(map(self.session, RANKS))

    async def dumps(self) -> dict[RankId, RankDump]:
        """What the ranks that answer are doing."""
        known = [m.incarnation for m in self.supervisor.members if self._answers(m.incarnation)]
        found = await asyncio.gather(
            *(ask_dump(incarnation, timeout_s=2.0) for incarnation in known),
            return_exceptions=True,
        )
        return {i.rank: d for i, d in zip(known, found, strict=True) if isinstance(d, RankDump)}

    def _answers(self, incarnation: Incarnation) -> bool:
        return incarnation.rank not in self.frozen

    async def statuses(self) -> dict[RankId, RankStatus]:
        """Of the ranks that have a session and answer."""
        found = {}
        for rank in RANKS:
            if replica := self.session(rank):
                with suppress(RankLost):
                    found[rank] = await replica.client.status()
        return found

    def descriptors(self) -> dict[Incarnation, int]:
        """Open file descriptors of each rank, its transfer processes' included."""
        infos = map(self.info, RANKS)
        return {i.incarnation: sum(map(descriptors.count, _family(i.pid))) for i in infos}

    def half_closed(self) -> dict[Incarnation, list[str]]:
        """Connections of each rank that their peers have closed, and the rank has not."""
        found = {}
        for info in map(self.info, RANKS):
            ends = map(descriptors.half_closed, _family(info.pid))
            found[info.incarnation] = list(chain.from_iterable(ends))
        return found

    def reroutes(self) -> float:
        """Of the first router, since it started."""
        page = self.parts.status.metrics().decode()
        (line,) = [line for line in page.splitlines() if line.startswith(REROUTES)]
        return float(line.split()[-1])

    # --- tormenting -----------------------------------------------------------------------------

    def kill(self, rank: RankId, number: int = signal.SIGKILL) -> None:
        os.kill(self.info(rank).pid, number)

    def freeze(self, rank: RankId) -> int:
        """SIGSTOP to a rank and its transfer processes; the rank's pid, for ``thaw``."""
        pid = self.info(rank).pid
        self.frozen.add(rank)
        _signal_family(pid, signal.SIGSTOP)
        return pid

    def thaw(self, rank: RankId, pid: int) -> None:
        self.frozen.discard(rank)
        _signal_family(pid, signal.SIGCONT)

    def keep_port(self, rank: RankId) -> None:
        """Let a rank come back on the port it has; until ``free_port``."""
        port = self.info(rank).incarnation.endpoint.rpartition(":")[2]
        port_file(control(self.controls, rank)).write_text(port, "utf-8")

    def free_port(self, rank: RankId) -> None:
        port_file(control(self.controls, rank)).unlink()

    def cut(self, rank: RankId) -> None:
        self.frozen.add(rank)
        self.hosts.cut(host_name(rank))

    def heal(self, rank: RankId) -> None:
        self.frozen.discard(rank)
        self.hosts.heal(host_name(rank))

    def writes(self, fault: Fault | None, *ranks: RankId) -> None:
        """Hold or fail the KV writes of prefill ranks; None: let them be."""
        for rank in ranks or RANKS:
            control(self.controls, rank).write_text(fault or "", "utf-8")


def control(controls: Path, rank: RankId) -> Path:
    """The file that a rank's transport obeys."""
    return controls / host_name(rank)


@asynccontextmanager
async def running(hosts: Hosts, controls: Path) -> AsyncIterator[Cluster]:
    """A cluster that serves; everything is ended afterwards."""
    config = presets.read("cpu", SETTINGS)
    folder = model_store.resolve(config.model.source, lambda _: None)
    plan = Plan(config, folder, read_spec(folder), cpu())

    def placed(rank: RankId) -> RankSpec:
        return msgspec.structs.replace(plan.rank(rank), host=hosts.address(host_name(rank)))

    def command(spec: RankSpec) -> Sequence[str]:
        words = (sys.executable, "-m", "tests.chaos.rank", str(control(controls, spec.rank)))
        return hosts.within(host_name(spec.rank), words)

    reconcile.HEALED_S = HEALED_S  # else it would rest for a minute after four kills
    ports: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
    model = msgspec.structs.replace(served_model(plan, 0), context_len=2 * RANK_CONTEXT)
    async with router(config.router, model, folder) as parts:
        hooks = Hooks(parts.replicas.update, parts.selftest.through, parts.replicas.idle)
        launcher = ProcessLauncher(config.cluster, command)
        keeper = LeaseKeeper(config.cluster.lease, RealClock())
        supervisor = Supervisor(
            launcher, placed, hooks, RealClock(), plan.desired, hold=keeper.hold
        )
        add_operations(parts.app, operations(plan, supervisor))
        stop = asyncio.Event()
        keeping = asyncio.create_task(supervisor.run())
        fronts = asyncio.create_task(
            listen(config.router, parts.app, parts.rpc, lambda *p: ports.set_result(p), stop)
        )
        try:
            await supervisor.all_serving()
            yield Cluster(supervisor, parts, hosts, controls, await ports)
        finally:
            stop.set()
            await fronts
            parts.replicas.update(())
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


class SecondRouter:
    """Another router in front of the same ranks, in a process that can be killed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._served: Served | None = None

    async def up(self) -> str:
        """Start it where it is not there; the address of its gRPC front."""
        if self._served is None:
            self._served = Served(["--join", self._url], command="router")
        await asyncio.to_thread(self._served.wait_ready)
        words = next(line for line in self._served.lines if line.startswith("ready: "))
        return words.rstrip().rpartition(" on ")[2]

    async def kill(self) -> None:
        if self._served is not None:
            self._served.process.kill()
            await asyncio.to_thread(self._served.close)
            self._served = None


def _signal_family(pid: int, number: int) -> None:
    """To a process and its children, of which one may be ending by itself."""
    os.kill(pid, number)
    for child in _family(pid)[1:]:
        with suppress(ProcessLookupError):
            os.kill(child, number)


def _family(pid: int) -> list[int]:
    """A process, first, and its children."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for file in files for child in file.read_text("utf-8").split())]


async def serving_again(cluster: Cluster, timeout_s: float = 120.0) -> None:
    await eventually(lambda: cluster.serving, timeout_s)
