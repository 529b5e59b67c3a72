"""Requests in their phases, all that an event may do to them, and what is measured meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from core.wire import RankId
from tests.chaos import check
from tests.chaos.aims import Shot
from tests.chaos.cluster import Cluster, SecondRouter
from tests.chaos.load import Client, Got
from tests.chaos.phases import Phase
from tests.support.eventually import eventually

AWAY_S = 7.0  # longer than every time-out: a session's, a peer link's and a KV write's, 4.5 s each
SILENCE_SEEN_S = 6.0
WATCH_S = 0.02


@dataclass
class Scene:
    """A request in a phase, others struck with it, and all that an event may do to them."""

    cluster: Cluster
    client: Client
    draw: random.Random  # rolls what an event leaves open
    shot: Shot
    struck: dict[int, Got]  # the stage's own that are, by the lengths of their prompts
    router: SecondRouter  # through which they run, where the event says so
    notes: dict[str, float] = field(default_factory=dict)  # seconds, by what they measure
    problems: list[str] = field(default_factory=list)

    @property
    def role(self) -> str:
        """Whose rank is struck, where it may be either."""
        return self.shot.role

    async def noticed(self, rank: RankId, within_s: float) -> None:
        """Measure until the first router has lost its session with a rank."""
        clock, started = self.cluster.clock, self.cluster.clock.now()
        try:
            await eventually(lambda: self.cluster.session(rank) is None, within_s)
        except TimeoutError:
            self.problems.append(f"the router has not noticed {rank} within {within_s:g} s")
        took = clock.now() - started
        self.notes["noticed"] = max(took, self.notes.get("noticed", 0.0))

    async def forgotten(self, within_s: float) -> None:
        """Measure until no rank has any struck request any more."""
        took = await check.forgotten(self.cluster, self.struck, within_s)
        if took is None:
            self.problems.append(f"ranks still have a request after {within_s:g} s")
        else:
            self.notes["forgotten"] = took

    def victim(self, group: str) -> RankId:
        """The rank of this role that has the request; any where none has it."""
        return self.shot.rank(group)

    async def silence(self, rank: RankId, *, session: bool = True) -> None:
        """Last for ``AWAY_S`` and measure who notices that a rank is silent, each in time.

        The first router loses its session with the rank, if ``session``; and carries streams on
        elsewhere, at least the one aimed at where the silence holds that up.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(AWAY_S))
            tasks.create_task(self._rerouted(self.held_up_by(rank, session)))
            if session:
                tasks.create_task(self.noticed(rank, SILENCE_SEEN_S))

    def held_up_by(self, rank: RankId, session: bool) -> bool:
        """Whether a struck stream cannot go on without this rank."""
        late = self.shot.seen.phase in (Phase.DECODING, Phase.SEVERAL)
        queued = any(s.phase is Phase.QUEUED and s.prompt in self.struck for s in self.shot.hit)
        return queued or not late or (session and rank.group == "decode")

    async def _rerouted(self, needed: bool) -> None:
        """Measure until the first router carries a stream on elsewhere."""
        clock, started = self.cluster.clock, self.cluster.clock.now()
        before = self.cluster.reroutes()
        try:
            await eventually(lambda: self.cluster.reroutes() > before, SILENCE_SEEN_S, WATCH_S)
        except TimeoutError:
            if needed:
                self.problems.append(f"no stream was carried on within {SILENCE_SEEN_S:g} s")
            return
        self.notes["rerouted"] = clock.now() - started


Fire = Callable[[Scene], Awaitable[None]]
