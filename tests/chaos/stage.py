"""Plays one event: load, a request brought into a phase, the fault, and then every check."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from core.wire import RankId
from tests.chaos import check
from tests.chaos.cluster import RANK_CONTEXT, REPLICAS, Cluster, SecondRouter, serving_again
from tests.chaos.events import DEADLINE, Event, Verdict, victims
from tests.chaos.load import Ask, Client, Got, client
from tests.chaos.phases import HELD, Phase, Sighting, crowd, legs, reach, sight
from tests.chaos.rank import Fault
from tests.chaos.scene import Scene

WORKERS = 5  # streams that always run
ANSWER_S = 20.0  # a new request is answered within this, whatever happens
END_S = 60.0  # every stream has ended after this
REACH_S = 8.0
LET_GO_S = 10.0

# (prompt length, output tokens, choices): the lengths tell probes apart in dumps
PROBES = {
    Phase.QUEUED: Ask.drawn("queued", 2, 301, 60),
    Phase.PREFILLING: Ask.drawn("prefilling", 3, 901, 60),
    Phase.SENDING: Ask.drawn("sending", 4, 902, 60),
    Phase.WAITING: Ask.drawn("waiting", 5, 303, 60),
    Phase.DECODING: Ask.drawn("decoding", 6, 104, 400),
    Phase.SEVERAL: Ask.drawn("several", 7, 105, 250, 3),
}
# the router lets it through, and every rank refuses it
TOO_LONG = Ask.drawn("too long", 11, RANK_CONTEXT + 50, 4)
DEADLINES_S = {
    Phase.QUEUED: 0.6,
    Phase.PREFILLING: 0.7,
    Phase.SENDING: 0.8,
    Phase.WAITING: 1.5,
    Phase.DECODING: 1.0,
    Phase.SEVERAL: 1.5,
}
BACKGROUND = (
    *(Ask.drawn("load", i, 20 + 31 * i, 40 + 15 * i) for i in range(8)),
    Ask.drawn("load of three", 10, 64, 90, 3),
    TOO_LONG,
)
FRESH = Ask.drawn("fresh", 8, 50, 8)
FILLER = Ask.drawn("filler", 9, 700, 2)
ASKS = (*PROBES.values(), *BACKGROUND, FRESH, FILLER)
CHOICES = {len(ask.prompt): ask.n for ask in ASKS}
assert len(CHOICES) == len(ASKS), "a request is told by the length of its prompt"


@dataclass
class Result:
    """One event in one phase: what was seen, measured and found wrong."""

    event: str
    wanted: Phase
    seen: Phase | None = None  # None: the request was never seen in the phase
    hits: frozenset[Phase] = frozenset()  # where other requests were that it struck as well
    notes: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    streams: int = 0  # compared with the undisturbed run
    # reasons with which some ended early while no rank or no place was left
    excused: Counter[str] = field(default_factory=Counter)


class Stage:
    """Made once for a cluster; ``learn`` comes first."""

    def __init__(self, cluster: Cluster, main: Client, draw: random.Random) -> None:
        self._cluster = cluster
        self._client = main
        self._draw = draw
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

    async def play(self, event: Event, phase: Phase) -> Result:
        result = Result(event.name, phase)
        over, load = asyncio.Event(), list[Got]()
        async with self._through(event) as through:
            workers = [asyncio.create_task(self._work(i, load, over)) for i in range(WORKERS)]
            try:
                await asyncio.sleep(0.3)
                await self._aim(event, through, phase, result, load)
            finally:
                self._cluster.writes(None)
                over.set()
                await self._end(workers, result)
        self._judge(load, result, event.others)
        await self.settle(result)
        return result

    # --- the request that is aimed at -----------------------------------------------------------

    async def _aim(
        self, event: Event, through: Client, phase: Phase, result: Result, load: list[Got]
    ) -> None:
        ask = PROBES[phase]
        probe, request_id = Got(ask), f"probe-{self._salts}"
        limit_s = DEADLINES_S[phase] if event.name == DEADLINE else None
        if phase in HELD:
            self._cluster.writes(Fault.HOLD)
        fillers = self._fill(load) if phase is Phase.QUEUED else []
        running = asyncio.create_task(through.follow(probe, self._salt(), request_id, limit_s))
        seen = await self._reach(event, ask, phase, running)
        struck = 0.0
        if seen is None:
            self._cluster.writes(None)
        else:
            result.hits = await self._hits(event, seen)
            result.seen, struck = seen.phase, self._cluster.clock.now()
            await self._strike(event, Scene(
                self._cluster, through, self._draw, probe, request_id, seen, self._second
            ), result, load)  # fmt: skip
        await self._end([running, *fillers], result)
        if struck and event.second_router:
            await self._come_back(ask, load, result)
        if struck and probe.status == "OK" and event.verdict is not check.aborted:
            result.notes["pause"] = probe.pause(struck)
        verdict = event.verdict if seen is not None else check.beginning
        if problem := verdict(probe, self._reference[_key(ask)]):
            result.problems.append(problem)
        result.streams += 1

    async def _reach(
        self, event: Event, ask: Ask, phase: Phase, running: asyncio.Task[None]
    ) -> Sighting | None:
        look = self._cluster.dumps
        prompt = len(ask.prompt)
        if event.name != DEADLINE:
            seen = await reach(look, prompt, ask.n, phase, REACH_S)
        else:
            seen = None
            while not running.done():  # the last phase before the end
                seen = sight(legs(await look(), prompt), ask.n) or seen
        if seen is not None and seen.prefill is None:  # any will do
            anyone = RankId(group="prefill", replica=self._draw.randrange(REPLICAS))
            seen = dataclasses.replace(seen, prefill=anyone)
        return seen

    async def _hits(self, event: Event, seen: Sighting) -> frozenset[Phase]:
        if not event.groups:
            return frozenset()
        everyone = crowd(await self._cluster.dumps(), CHOICES)
        struck = victims(event, seen)
        return frozenset(other.phase for other in everyone if other.hit(struck))

    async def _strike(self, event: Event, scene: Scene, result: Result, load: list[Got]) -> None:
        """The fault, and beside it a new request that has to be answered soon."""
        clock = self._cluster.clock
        struck = clock.now()
        fresh = Got(FRESH)
        load.append(fresh)
        asked = asyncio.create_task(self._client.follow(fresh, self._salt()))
        await event.fire(scene)
        result.notes |= scene.notes
        result.problems += scene.problems
        await self._end([asked], result)
        if fresh.arrivals:
            result.notes["answered"] = took = fresh.arrivals[-1] - struck
            if took > ANSWER_S:
                result.problems.append(f"a new request was answered after {took:.1f} s")

    async def _come_back(self, ask: Ask, load: list[Got], result: Result) -> None:
        """What a caller does whose router died: ask the other one, and it again, once it is up."""
        clock, started = self._cluster.clock, self._cluster.clock.now()
        elsewhere, again = Got(ask), Got(FRESH)
        load += elsewhere, again
        other = asyncio.create_task(self._client.follow(elsewhere, self._salt()))
        async with client(await self._second.up(), clock) as back:
            await back.follow(again, self._salt())
        result.notes["router back"] = clock.now() - started
        await self._end([other], result)

    def _fill(self, load: list[Got]) -> list[asyncio.Task[None]]:
        """Keep both prefill ranks busy for a while."""
        fillers = [Got(FILLER) for _ in range(2 * REPLICAS)]
        load += fillers
        return [asyncio.create_task(self._client.follow(got, self._salt())) for got in fillers]

    # --- everybody else -------------------------------------------------------------------------

    async def _work(self, number: int, load: list[Got], over: asyncio.Event) -> None:
        """One stream after the other; half of them find their prompt cached."""
        turn = number
        while not over.is_set():
            got = Got(BACKGROUND[turn % len(BACKGROUND)])
            load.append(got)
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
