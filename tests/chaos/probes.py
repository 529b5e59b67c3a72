"""Brings requests into all phases at the same time, and says when a fault would hit most."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tests.chaos.aims import Aim, Shot, best
from tests.chaos.asks import ASKS, DECODING, FILLERS, SEVERAL, WAITING, by_length
from tests.chaos.cluster import Cluster
from tests.chaos.load import Ask, Client, Got
from tests.chaos.phases import Phase, Sighting, crowd
from tests.chaos.rank import Fault

POLL_S = 0.01
STEADY_S = 3.0  # at most, until those that keep their phase are in it
REACH_S = 4.0  # at most, then, until the wanted phase is seen
FULL_S = 0.5  # how long a moment is sought that covers all that is short
BRIEF_S = 0.1  # the same for a phase that will soon be over
LIMIT_S = 0.8  # when deadlines pass; those of fillers, one after the other:
FILLER_LIMITS_S = (0.08, 0.4)
BEFORE_S = 0.2  # so long before its deadline the phase of a request is still the one it ends in
HOLDS = 0.5  # of the plays with prefilling in which writes need not flow

BY_LENGTH = by_length(ASKS)
HELD = frozenset({Phase.SENDING, Phase.WAITING})  # writes must be held to see them
FREE = frozenset({Phase.PREFILLING})  # chunks are sent as they come
ONE = frozenset({Aim.PREFILL, Aim.LINK})  # of prefill ranks, which prefill one prompt at a time
BRIEF = frozenset({Phase.QUEUED, Phase.PREFILLING, Phase.SENDING})


@dataclass
class Probe:
    """One request of the company, and the task that follows it."""

    got: Got
    running: asyncio.Task[None]
    deadline: float = math.inf
    seen: Sighting | None = None  # the last while it went on
    seen_at: float = 0.0  # when the ranks were asked


def holds(aim: Aim, wanted: Phase, short: Collection[Phase], draw: random.Random) -> bool:
    """Whether KV writes are held back while the company gathers: where that has to be, or brings
    more that is ``short``. Prefilling is struck without, too: at random, or always where a held
    write would make it count as sending.
    """
    if wanted in HELD or HELD.isdisjoint(short):
        return wanted in HELD
    return wanted not in FREE or (aim not in ONE and draw.random() < HOLDS)


def attainable(aim: Aim, wanted: Phase, held: bool) -> frozenset[Phase]:
    """The phases in which one shot may well hit requests: what is worth waiting for."""
    if not held:
        return frozenset(Phase) - HELD
    return frozenset(Phase) - (FREE if aim in ONE and wanted not in FREE else frozenset())


def passed(probe: Probe) -> bool:
    """Whether its deadline has, in the phase in which it was just before."""
    late = probe.got.status == "DEADLINE_EXCEEDED"
    return late and probe.deadline - probe.seen_at < BEFORE_S


class Company:
    """The requests of one play. ``salt`` gives each a cache of its own."""

    def __init__(self, cluster: Cluster, client: Client, salt: Callable[[], str]) -> None:
        self._cluster = cluster
        self._client = client
        self._salt = salt
        self.probes: dict[int, Probe] = {}  # by the length of the prompt

    async def gather(self, phases: Collection[Phase], *, hold: bool, limited: bool) -> None:
        """First those that keep their phase, then those that fill the prefill ranks.

        Nobody is sent who would be in none of ``phases``. ``limited``: with deadlines.
        """
        limits_s = [LIMIT_S if limited else None] * len(ASKS)
        late = (*(DECODING if Phase.DECODING in phases else ()),
                *(SEVERAL if Phase.SEVERAL in phases else ()))  # fmt: skip
        self._start(late, limits_s)
        await self._reached(late, {Phase.DECODING, Phase.SEVERAL})
        if hold:
            self._cluster.writes(Fault.HOLD)
        if Phase.WAITING in phases:
            self._start(WAITING, limits_s)
            if hold:
                await self._reached(WAITING, {Phase.WAITING})
        if not BRIEF.isdisjoint(phases):
            first, last = FILLER_LIMITS_S
            each = (last - first) / (len(FILLERS) - 1)
            soon = [first + each * i if limited else None for i in range(len(FILLERS))]
            self._start(FILLERS, soon)

    async def aim(
        self, aim: Aim, wanted: Phase, short: Collection[Phase], held: bool, draw: random.Random
    ) -> Shot | None:
        """Wait for a moment in which a fault hits the wanted phase, and others of those that are
        ``short`` if that comes soon; None where the wanted one was never seen.
        """
        clock, worth = self._cluster.clock, attainable(aim, wanted, held).intersection(short)
        until = clock.now() + (BRIEF_S if wanted in BRIEF else FULL_S)
        try:
            async with asyncio.timeout(REACH_S):
                while True:
                    shot = best(aim, wanted, await self._crowd(), self.probes, short, draw)
                    if shot and (worth <= shot.covers or clock.now() > until):
                        return shot
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return None

    async def pass_deadlines(
        self, wanted: Phase, short: Collection[Phase], draw: random.Random
    ) -> Shot | None:
        """Wait for all deadlines; each request is struck in the phase it was in just before."""
        while not all(probe.running.done() for probe in self.probes.values()):
            await self._crowd()
        last = [probe.seen for probe in self.probes.values() if probe.seen and passed(probe)]
        return best(Aim.CALLER, wanted, last, self.probes, short, draw)

    def _start(self, asks: Sequence[Ask], limits_s: Sequence[float | None]) -> None:
        now = self._cluster.clock.now()
        for ask, limit_s in zip(asks, limits_s, strict=False):
            salt = self._salt()
            got = Got(ask, request_id=f"probe-{salt}")
            running = asyncio.create_task(self._client.follow(got, salt, limit_s))
            self.probes[len(ask.prompt)] = Probe(got, running, now + (limit_s or math.inf))

    async def _reached(self, asks: Sequence[Ask], phases: Collection[Phase]) -> None:
        """Wait until each that goes on is in one of the phases, or for a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STEADY_S):
                while True:
                    there = {seen.prompt for seen in await self._crowd() if seen.phase in phases}
                    going = [ask for ask in asks if not self._probe(ask).running.done()]
                    if all(len(ask.prompt) in there for ask in going):
                        return
                    await asyncio.sleep(POLL_S)

    def _probe(self, ask: Ask) -> Probe:
        return self.probes[len(ask.prompt)]

    async def _crowd(self) -> list[Sighting]:
        """Every request in a clear phase; noted for those of the company that still go on."""
        asked = self._cluster.clock.now()
        found = crowd(await self._cluster.dumps(), BY_LENGTH)
        for seen in found:
            if (probe := self.probes.get(seen.prompt)) and not probe.running.done():
                probe.seen, probe.seen_at = seen, asked
        return found
