"""Supervisor: keeps as many replicas serving as are wanted. A thin shell around reconcile.py.

It starts replicas through a Launcher, lets each new one answer a test request before routers may
use it, drains before it stops, and starts again what died, or what it killed because it had fallen
silent or hung (cluster/keeper.py). Routers learn who is there through ``publish``; each loss and
each join is a new list of members.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster.reconcile import (
    Action,
    Drain,
    Life,
    Phase,
    ReplicaState,
    Start,
    Stop,
    Test,
    reconcile,
)
from core.clock import Clock
from core.config import RankSpec
from core.errors import OperatorError, RankLost, RequestError
from core.wire import Incarnation, RankId, RankInfo
from router.echo import clipped, quoted
from router.replicas import Member, MemberState

log = logging.getLogger(__name__)

ROUND_S = 0.5  # how often time alone may change something
MEMBER_STATES = {
    Phase.TESTING: MemberState.JOINING,
    Phase.SERVING: MemberState.SERVING,
    Phase.DRAINING: MemberState.DRAINING,
}


class Launcher(Protocol):
    """Whoever can run ranks: this process, or Ray."""

    async def open(self) -> None:
        """Get ready to start ranks. Raises OperatorError."""
        ...

    async def start(self, spec: RankSpec) -> RankInfo:
        """Start a rank; returns when it can take requests.

        Raises OperatorError in the rank's own words when it cannot start as it is, RankLost when
        it died. Cancelled, it leaves nothing behind.
        """
        ...

    async def gone(self, rank: RankId) -> str:
        """Wait until a started rank's process is no more; how it went."""
        ...

    async def stop(self, rank: RankId) -> None:
        """End a rank in order if it answers, at once if not; unknown ranks are fine."""
        ...

    async def kill(self, rank: RankId) -> None:
        """End a rank's process at once and for certain, also one that is stopped or hangs."""
        ...

    async def close(self) -> None: ...


Hold = Callable[[Incarnation], Awaitable[str]]  # returns when a rank is to be replaced; why


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the supervisor asks of the routers' side."""

    publish: Callable[[tuple[Member, ...]], None]
    test: Callable[[RankId], Awaitable[str]]  # a request through this rank: the problem, or ""
    idle: Callable[[RankId], Awaitable[None]]  # returns when the rank has no request left


class Supervisor:
    """All methods on one event loop. ``run`` until cancelled; it stops every replica at its end."""

    def __init__(
        self,
        launcher: Launcher,
        plan: Callable[[RankId], RankSpec],
        hooks: Hooks,
        clock: Clock,
        desired: Mapping[str, int],
        drain_limit_s: float = 600.0,
        hold: Hold | None = None,
    ) -> None:
        """``hold`` keeps the lease of a rank from the moment that it is up; None: there is none."""
        self._launcher = launcher
        self._plan = plan
        self._hooks = hooks
        self._clock = clock
        self._desired = dict(desired)
        self._drain_limit_s = drain_limit_s
        self._hold = hold
        self._states: dict[RankId, ReplicaState] = {}
        self._infos: dict[RankId, RankInfo] = {}
        self._work: dict[RankId, asyncio.Task[None]] = {}  # one at a time for each rank
        # for each rank that is up: one waits for its process to end, one holds its lease
        self._watchers: dict[RankId, list[asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._published: tuple[Member, ...] = ()
        self._awaited = False  # whether somebody waits in ``all_serving``

    # --- what operations ask ----------------------------------------------------------------

    def scale(self, wanted: Mapping[str, int]) -> None:
        """Change how many replicas groups shall have. Raises RequestError for a bad one."""
        for group, count in wanted.items():
            if group not in self._desired:
                known = ", ".join(sorted(self._desired))
                raise RequestError(
                    f"no group {quoted(group)}: this cluster has {known}", param="replicas"
                )
            if count < 1:
                raise RequestError(
                    f"{group}={clipped(count)}: a group needs at least 1", param=group
                )
        self._desired.update(wanted)
        self._wake()

    def drain(self, rank: RankId) -> None:
        """Take one replica out for good: its group shrinks by one. Raises RequestError."""
        state = self._states.get(rank)
        if state is None or state.phase is not Phase.SERVING:
            raise RequestError(f"{clipped(rank)} is not a serving rank", param="rank")
        if self._desired[rank.group] <= 1:
            raise RequestError(
                f"{rank} is the last of its group: scale {rank.group} up first", param="rank"
            )
        self._desired[rank.group] -= 1
        self._states[rank] = state.enter(Phase.DRAINING, self._clock.now())
        self._perform(Drain(rank))
        self._wake()

    def states(self) -> tuple[ReplicaState, ...]:
        """Every replica."""
        return tuple(self._states[rank] for rank in sorted(self._states))

    def lives(self, doubt: Callable[[Incarnation], str] = lambda _: "") -> tuple[Life, ...]:
        """The same for status pages; ``doubt`` says what is wrong with a rank that is up."""
        now, infos = self._clock.now(), self._infos
        return tuple(
            Life.at(state, now, doubt(infos[rank].incarnation) if rank in infos else "")
            for rank, state in sorted(self._states.items())
        )

    @property
    def desired(self) -> dict[str, int]:
        return dict(self._desired)

    @property
    def members(self) -> tuple[Member, ...]:
        """As last published."""
        return self._published

    async def all_serving(self) -> None:
        """Wait for the first complete start. Raises OperatorError when replicas cannot start."""
        self._awaited = True
        try:
            while True:
                changed = self._changed
                states = self.states()
                crashed = [state for state in states if state.crashes and state.problem]
                if crashed:
                    lines = (f"{state.rank} did not start: {state.problem}" for state in crashed)
                    raise _Unstartable("\n".join(lines))
                if states and all(state.phase is Phase.SERVING for state in states):
                    return
                await changed.wait()
        finally:
            self._awaited = False

    # --- the loop -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Rounds until cancelled."""
        try:
            while True:
                changed = self._changed
                self._round()
                try:
                    async with asyncio.timeout(ROUND_S):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            await self._stop_all()

    def _round(self) -> None:
        now = self._clock.now()
        self._states, actions = reconcile(self._desired, self._states, now, self._drain_limit_s)
        for action in actions:
            self._perform(action)
        self._publish()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _publish(self) -> None:
        members = tuple(
            Member(info.incarnation, info.role, MEMBER_STATES[self._states[rank].phase])
            for rank, info in sorted(self._infos.items())
            if rank in self._states and self._states[rank].phase in MEMBER_STATES
        )
        if members != self._published:
            self._published = members
            self._hooks.publish(members)

    def _perform(self, action: Action) -> None:
        """Begin an action; what the rank was busy with before no longer matters."""
        if running := self._work.pop(action.rank, None):
            running.cancel()
        work = {Start: self._start, Test: self._test, Drain: self._idle, Stop: self._stop}
        task = asyncio.create_task(work[type(action)](action.rank))
        self._work[action.rank] = task
        task.add_done_callback(_complain)

    async def _start(self, rank: RankId) -> None:
        try:
            info = await self._launcher.start(self._plan(rank))
        except (OperatorError, RankLost) as error:
            self._crashed(rank, str(error))
            return
        self._infos[rank] = info
        watchers = [asyncio.create_task(self._watch(rank))]
        if self._hold is not None:
            watchers.append(asyncio.create_task(self._guard(self._hold, info.incarnation)))
        self._watchers[rank] = watchers
        for watcher in watchers:
            watcher.add_done_callback(_complain)
        self._enter(rank, Phase.TESTING)
        await self._test(rank)

    async def _test(self, rank: RankId) -> None:
        if problem := await self._hooks.test(rank):
            self._forget(rank)  # it ends by our hand: nobody is to report that as a crash
            await self._launcher.stop(rank)
            self._crashed(rank, problem)
        else:
            self._enter(rank, Phase.SERVING)

    async def _idle(self, rank: RankId) -> None:
        self._publish()
        await self._hooks.idle(rank)
        self._enter(rank, Phase.STOPPING)
        await self._stop(rank)

    async def _stop(self, rank: RankId) -> None:
        self._forget(rank)
        self._publish()
        await self._launcher.stop(rank)
        del self._states[rank]
        self._wake()

    async def _watch(self, rank: RankId) -> None:
        words = await self._launcher.gone(rank)
        if running := self._work.pop(rank, None):
            running.cancel()
        self._over(rank, words)

    async def _guard(self, hold: Hold, life: Incarnation) -> None:
        words, rank = await hold(life), life.rank
        if running := self._work.pop(rank, None):
            running.cancel()
        task = self._work[rank] = asyncio.create_task(self._replace(rank, words))
        task.add_done_callback(_complain)

    async def _replace(self, rank: RankId, words: str) -> None:
        """Routers hear of it first: a process may take a while to end."""
        self._forget(rank)
        self._publish()
        await self._launcher.kill(rank)
        self._over(rank, words)

    def _over(self, rank: RankId, words: str) -> None:
        """Its process is no more, and not because it was to stop."""
        if self._states[rank].phase in (Phase.DRAINING, Phase.STOPPING):
            log.warning("rank %s is gone before it was stopped: %s", rank, words)
            self._forget(rank)
            del self._states[rank]
            self._wake()
        else:
            self._crashed(rank, words)

    def _enter(self, rank: RankId, phase: Phase) -> None:
        self._states[rank] = self._states[rank].enter(phase, self._clock.now())
        self._publish()
        self._wake()

    def _crashed(self, rank: RankId, problem: str) -> None:
        self._forget(rank)
        self._states[rank] = self._states[rank].crashed(self._clock.now(), problem)
        # who waits in ``all_serving`` gets it as an error, and once is enough
        log.log(logging.INFO if self._awaited else logging.ERROR, "rank %s: %s", rank, problem)
        self._publish()
        self._wake()

    def _forget(self, rank: RankId) -> None:
        self._infos.pop(rank, None)
        for watcher in self._watchers.pop(rank, ()):
            if watcher is not asyncio.current_task():
                watcher.cancel()

    async def _stop_all(self) -> None:
        """Decode ranks before the prefill ranks that they listen to."""
        tasks = [*self._work.values(), *itertools.chain(*self._watchers.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for rank in sorted(self._states):
            await self._launcher.stop(rank)
        self._states.clear()
        self._infos.clear()


class _Unstartable(OperatorError):
    """A replica's own words on why it cannot start."""


def _complain(task: asyncio.Task[None]) -> None:
    """Work ends by itself or by cancellation; anything else is a defect that must be seen."""
    if not task.cancelled() and (error := task.exception()):
        log.error("the supervisor's work failed", exc_info=error)
