"""Plays one event: load, requests brought into their phases, the fault, and then every check."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.chaos import check
from tests.chaos.aims import Aim, Shot
from tests.chaos.asks import ASKS, BACKGROUND, FRESH, TOO_LONG
from tests.chaos.check import Verdict
from tests.chaos.cluster import Cluster, SecondRouter, serving_again
from tests.chaos.events import DEADLINE, Event
from tests.chaos.load import Ask, Client, Got, client
from tests.chaos.phases import Phase
from tests.chaos.probes import Company, holds
from tests.chaos.scene import Scene

WORKERS = 5  # streams that always run
ANSWER_S = 20.0  # a new request is answered within this, whatever happens
END_S = 60.0  # every stream has ended after this
LET_GO_S = 10.0


@dataclass
class Result:
    """One event in one phase: what was seen, measured and found wrong."""

    event: str
    wanted: Phase
    seen: Phase | None = None  # None: the request was never seen in the phase
    hits: frozenset[Phase] = frozenset()  # it struck requests in these, each of which counts once
    notes: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    streams: int = 0  # compared with the undisturbed run
    # reasons with which some ended early while no rank or no place was left
    excused: Counter[str] = field(default_factory=Counter)


@dataclass
class _Play:
    """What one event is played with."""

    event: Event
    result: Result
    load: list[Got] = field(default_factory=list)  # the streams of everybody else
    over: asyncio.Event = field(default_factory=asyncio.Event)  # they are to come to their ends
    struck: float = 0.0  # when the fault came


class Stage:
    """Made once for a cluster; ``learn`` comes first. ``alone``: no requests in other phases are
    brought there beside those that are aimed at.
    """

    def __init__(self, cluster: Cluster, main: Client, draw: random.Random, *, alone: bool) -> None:
        self._cluster = cluster
        self._client = main
        self._draw = draw
        self._alone = alone
        self._salts = 0
        self._reference: dict[str, Got] = {}
        self._second = SecondRouter(cluster.url)
        self.descriptors = check.Descriptors()

    async def learn(self) -> None:
        """The undisturbed run: what every request says when nothing happens."""
        found = [Got(ask) for ask in ASKS]
        await asyncio.gather(*(self._client.follow(got, self._salt()) for got in found))
        for got in found:
            assert not (problem := _verdict(got, check.whole)(got, got)), problem
            self._reference[_key(got.ask)] = got
        assert not (words := await check.rest(self._cluster)), words
        self._take_descriptors()

    async def play(self, event: Event, phase: Phase, short: Collection[Phase]) -> Result:
        """Aimed at a request in ``phase``, and at as many others as may be in those ``short``."""
        play = _Play(event, Result(event.name, phase))
        clock, started = self._cluster.clock, self._cluster.clock.now()
        async with self._through(event) as through:
            workers = [asyncio.create_task(self._work(i, play)) for i in range(WORKERS)]
            try:
                await self._aim(play, through, short)
            finally:
                self._cluster.writes(None)
                play.over.set()
                await self._end(workers, play.result)
        self._judge(play.load, play.result, event.others)
        await self.settle(play.result)
        play.result.notes["in all"] = clock.now() - started
        return play.result

    # --- the requests that are aimed at ---------------------------------------------------------

    async def _aim(self, play: _Play, through: Client, short: Collection[Phase]) -> None:
        event, result, clock = play.event, play.result, self._cluster.clock
        started = clock.now()
        held = holds(event.aim, result.wanted, short, self._draw)
        company, limited = Company(self._cluster, through, self._salt), event.name == DEADLINE
        phases = {result.wanted} if self._alone else frozenset(Phase)
        await company.gather(phases, hold=held, limited=limited)
        if limited:
            shot = await company.pass_deadlines(result.wanted, short, self._draw)
        else:
            shot = await company.aim(event.aim, result.wanted, short, held, self._draw)
        result.notes["aimed"] = clock.now() - started
        probes = company.probes
        if shot is not None:
            hit = {s.prompt: probes[s.prompt].got for s in shot.hit if s.prompt in probes}
            scene = Scene(self._cluster, through, self._draw, shot, hit, self._second)
            await self._strike(play, scene)
        self._cluster.writes(None)
        play.over.set()
        await self._end([probe.running for probe in probes.values()], result)
        if shot is not None and event.second_router:
            await self._come_back([probe.got.ask for probe in probes.values()], play)
        self._judge_probes(play, shot, [probe.got for probe in probes.values()])

    async def _strike(self, play: _Play, scene: Scene) -> None:
        """The fault, and beside it a new request that has to be answered soon."""
        clock, result, shot = self._cluster.clock, play.result, scene.shot
        result.seen, result.hits = shot.seen.phase, shot.covers
        play.struck = clock.now()
        fresh = Got(FRESH)
        play.load.append(fresh)
        asked = asyncio.create_task(self._client.follow(fresh, self._salt()))
        await play.event.fire(scene)
        result.notes |= scene.notes
        result.problems += scene.problems
        await self._end([asked], result)
        if fresh.arrivals:
            result.notes["answered"] = took = fresh.arrivals[-1] - play.struck
            if took > ANSWER_S:
                result.problems.append(f"a new request was answered after {took:.1f} s")

    async def _come_back(self, asks: Iterable[Ask], play: _Play) -> None:
        """What callers do whose router died: ask the other one, and it again, once it is up."""
        clock, started = self._cluster.clock, self._cluster.clock.now()
        elsewhere, again = [Got(ask) for ask in asks], Got(FRESH)
        play.load += *elsewhere, again
        others = [asyncio.create_task(self._client.follow(got, self._salt())) for got in elsewhere]
        async with client(await self._second.up(), clock) as back:
            await back.follow(again, self._salt())
        play.result.notes["router back"] = clock.now() - started
        await self._end(others, play.result)

    def _judge_probes(self, play: _Play, shot: Shot | None, probes: Iterable[Got]) -> None:
        """Those that were hit strictly; where no clear phase was seen, they may have ended."""
        event, result = play.event, play.result
        hit = {seen.prompt for seen in shot.hit} if shot else set()
        for got in probes:
            prompt, verdict = len(got.ask.prompt), event.verdict
            if prompt not in hit:
                verdict = event.unclear if shot or event.name == DEADLINE else check.whole
            if problem := verdict(got, self._reference[_key(got.ask)]):
                result.problems.append(problem)
            aimed = shot is not None and prompt == shot.seen.prompt
            if aimed and event.aim is not Aim.CALLER and got.status == "OK":
                result.notes["pause"] = got.pause(play.struck)
            result.streams += 1

    # --- everybody else -------------------------------------------------------------------------

    async def _work(self, number: int, play: _Play) -> None:
        """One stream after the other; half of them find their prompt cached."""
        turn = number
        while not play.over.is_set():
            got = Got(BACKGROUND[turn % len(BACKGROUND)])
            play.load.append(got)
            await self._client.follow(got, "shared" if turn % 2 else self._salt())
            turn += 1

    async def _end(self, tasks: list[asyncio.Task[None]], result: Result) -> None:
        done, pending = await asyncio.wait(tasks, timeout=END_S)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if pending:
            result.problems.append(f"{len(pending)} streams have not ended after {END_S:g} s")
        for task in done:
            task.result()

    def _judge(self, load: list[Got], result: Result, verdict: Verdict) -> None:
        for got in load:
            if problem := _verdict(got, verdict)(got, self._reference[_key(got.ask)]):
                result.problems.append(problem)
        result.streams += len(load)
        result.excused.update(
            got.words for got in load if got.status != "OK" and got.ask is not TOO_LONG
        )

    async def settle(self, result: Result) -> None:
        clock = self._cluster.clock
        started = clock.now()
        try:
            await serving_again(self._cluster)
        except TimeoutError:
            result.problems.append(f"not all serve again: {self._cluster.supervisor.states()}")
            return
        result.notes["all serve"] = clock.now() - started
        started = clock.now()
        if words := await check.rest(self._cluster):
            result.problems.append(words)
            return
        result.notes["at rest"] = clock.now() - started
        result.problems += await self._let_go(result)
        result.problems += self._take_descriptors()

    async def _let_go(self, result: Result) -> list[str]:
        """A rank keeps connections to an engine that is gone until it meets the next one: a few
        requests later, when each has met each, there are none. What it keeps after that.
        """
        started = self._cluster.clock.now()
        until = started + LET_GO_S
        while (kept := check.dead_connections(self._cluster)) and self._cluster.clock.now() < until:
            few = [Got(ask) for ask in self._draw.sample(BACKGROUND, 5)]  # odd: all pairs meet
            await asyncio.gather(*(self._client.follow(got, self._salt()) for got in few))
            self._judge(few, result, check.whole)
            result.notes["let go"] = self._cluster.clock.now() - started
        return kept

    async def close(self) -> None:
        """End what was started for events."""
        await self._second.kill()

    def _take_descriptors(self) -> list[str]:
        return self.descriptors.took(self._cluster.descriptors())

    @asynccontextmanager
    async def _through(self, event: Event) -> AsyncIterator[Client]:
        """The router that the request goes through: the first, or one that may die."""
        if not event.second_router:
            yield self._client
            return
        async with client(await self._second.up(), self._cluster.clock) as second:
            yield second

    def _salt(self) -> str:
        """Never the same: every prompt is computed and sent."""
        self._salts += 1
        return f"salt-{self._salts}"


def _key(ask: Ask) -> str:
    return f"{ask.name} {ask.seed}"


def _verdict(got: Got, verdict: Verdict) -> Verdict:
    """The same, but for what no rank can take."""
    if got.ask is not TOO_LONG:
        return verdict
    return _refused if verdict is check.whole else _refused_or_excused


def _refused(got: Got, reference: Got) -> str:
    return check.ended("INVALID_ARGUMENT", got, reference)


def _refused_or_excused(got: Got, reference: Got) -> str:
    """No rank or no place may have been left, so that no rank refused it."""
    excused = got.status in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and got.words
    return "" if excused else _refused(got, reference)
