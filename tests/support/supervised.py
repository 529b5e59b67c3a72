"""A supervisor over a FakeLauncher, whose tests, drains and leases go as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.reconcile import Phase, ReplicaState
from cluster.supervisor import Hooks, Supervisor
from core.clock import RealClock
from core.wire import Incarnation, RankId
from router.replicas import Member, MemberState
from tests.support.fake_launcher import FakeLauncher, plan


class World:
    def __init__(self, **desired: int) -> None:
        self.launcher = FakeLauncher()
        self.lists: list[tuple[Member, ...]] = []
        self.tested: list[RankId] = []
        self.fails: dict[RankId, str] = {}
        self.busy: dict[RankId, asyncio.Event] = {}  # drains wait for it
        self.hangs: dict[RankId, asyncio.Event] = {}  # tests wait for it
        self.leases: dict[RankId, asyncio.Future[str]] = {}
        hooks = Hooks(self.lists.append, self._test, self._idle)
        self.supervisor = Supervisor(
            self.launcher, plan, hooks, RealClock(), desired, hold=self._hold
        )

    async def _test(self, rank: RankId) -> str:
        self.tested.append(rank)
        if rank in self.hangs:
            await self.hangs[rank].wait()
        await asyncio.sleep(0.001)
        return self.fails.pop(rank, "")

    async def _idle(self, rank: RankId) -> None:
        if rank in self.busy:
            await self.busy[rank].wait()

    async def _hold(self, life: Incarnation) -> str:
        lease = self.leases[life.rank] = asyncio.get_running_loop().create_future()
        return await lease

    def members(self) -> dict[RankId, MemberState]:
        return {m.incarnation.rank: m.state for m in self.lists[-1]} if self.lists else {}

    def serving(self) -> set[RankId]:
        return {r for r, state in self.members().items() if state is MemberState.SERVING}

    def state(self, rank: RankId) -> ReplicaState | None:
        return next((s for s in self.supervisor.states() if s.rank == rank), None)

    def phase(self, rank: RankId) -> Phase | None:
        state = self.state(rank)
        return None if state is None else state.phase


@asynccontextmanager
async def running(**desired: int) -> AsyncIterator[World]:
    """It serves; nothing may be left running at the end."""
    world = World(**desired)
    task = asyncio.create_task(world.supervisor.run())
    try:
        await world.supervisor.all_serving()
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not world.launcher.up, "something was left running"
    assert all(lease.done() for lease in world.leases.values()), "a lease was left"
