"""What goes wrong: each event is aimed at a request in a phase, and says what it must come to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from core.wire import RankId
from tests.chaos import check
from tests.chaos.cluster import LEASE_S, RANKS, Cluster, SecondRouter
from tests.chaos.load import Client, Got
from tests.chaos.phases import Phase, Sighting
from tests.chaos.rank import Fault
from tests.support.eventually import eventually

AWAY_S = 8.0  # longer than every time-out: a session's, a peer link's and a KV write's, 4.5 s each
KILL_SEEN_S = 2.0
SILENCE_SEEN_S = 6.0
GRACE_S = 5.0  # until a dead router's requests are gone: 2 s, and the handoffs' end


@dataclass
class Scene:
    """A request in a phase, with all that an event may do to it."""

    cluster: Cluster
    client: Client
    draw: random.Random
    probe: Got
    request_id: str
    seen: Sighting
    router: SecondRouter | None = None  # through which the probe runs
    notes: dict[str, float] = field(default_factory=dict)  # seconds, by what they measure
    problems: list[str] = field(default_factory=list)

    @property
    def prompt(self) -> int:
        return len(self.probe.ask.prompt)

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
        """Measure until no rank has the request any more."""
        took = await check.forgotten(self.cluster, self.prompt, within_s)
        if took is None:
            self.problems.append(f"ranks still have the request after {within_s:g} s")
        else:
            self.notes["forgotten"] = took


Fire = Callable[[Scene], Awaitable[None]]
Verdict = Callable[[Got, Got], str]


# --- callers ------------------------------------------------------------------------------------


async def disconnect(scene: Scene) -> None:
    scene.probe.leave()
    await _release_soon(scene)
    await scene.forgotten(GRACE_S)


async def abort(scene: Scene) -> None:
    if not await scene.client.abort(scene.request_id):
        scene.problems.append("the router does not know the request that is to be aborted")
    await _release_soon(scene)
    await scene.forgotten(GRACE_S)


async def deadline(scene: Scene) -> None:
    """It has passed already; the stage watched the request until then."""
    await _release_soon(scene)
    await scene.forgotten(GRACE_S)


async def _release_soon(scene: Scene) -> None:
    """Let a held write meet the end of its request, and then go on."""
    await asyncio.sleep(0.2)
    scene.cluster.writes(None)


# --- ranks --------------------------------------------------------------------------------------


def killed(group: str) -> Fire:
    async def fire(scene: Scene) -> None:
        rank = _victim(scene, group)
        scene.cluster.kill(rank)
        scene.cluster.writes(None)
        await scene.noticed(rank, KILL_SEEN_S)

    return fire


def stopped(group: str) -> Fire:
    """Held writes are let go while their process stands still: they go on when it wakes."""

    async def fire(scene: Scene) -> None:
        rank = _victim(scene, group)
        pid = scene.cluster.freeze(rank)
        try:
            scene.cluster.writes(None)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.sleep(AWAY_S))
                tasks.create_task(scene.noticed(rank, SILENCE_SEEN_S))
        finally:
            scene.cluster.thaw(rank, pid)

    return fire


def stopped_for_good(group: str) -> Fire:
    """Nobody wakes it: its lease runs out, and it is killed and replaced."""

    async def fire(scene: Scene) -> None:
        rank = _victim(scene, group)
        pid = scene.cluster.freeze(rank)
        scene.cluster.writes(None)
        await scene.noticed(rank, SILENCE_SEEN_S)
        try:
            await eventually(lambda: not Path(f"/proc/{pid}").exists(), LEASE_S + GRACE_S)
        except TimeoutError:
            scene.problems.append(f"{rank} still stands, {LEASE_S + GRACE_S:g} s later")
        scene.cluster.frozen.discard(rank)

    return fire


def cut_off(group: str) -> Fire:
    async def fire(scene: Scene) -> None:
        rank = _victim(scene, group)
        scene.cluster.cut(rank)
        try:
            scene.cluster.writes(None)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.sleep(AWAY_S))
                tasks.create_task(scene.noticed(rank, SILENCE_SEEN_S))
        finally:
            scene.cluster.heal(rank)

    return fire


async def both_restart(scene: Scene) -> None:
    """One rank of each role, in any order, the second perhaps while the first comes back."""
    ranks = [_victim(scene, "prefill"), _victim(scene, "decode")]
    scene.draw.shuffle(ranks)
    scene.cluster.kill(ranks[0])
    scene.cluster.writes(None)
    await scene.noticed(ranks[0], KILL_SEEN_S)
    await asyncio.sleep(scene.draw.uniform(0, 2))
    scene.cluster.kill(ranks[1])
    await scene.noticed(ranks[1], KILL_SEEN_S)


async def all_restart(scene: Scene) -> None:
    """Nobody is left who could take a stream on, for longer than some will wait."""
    for rank in scene.draw.sample(RANKS, len(RANKS)):
        scene.cluster.kill(rank)
    scene.cluster.writes(None)
    for rank in RANKS:
        await scene.noticed(rank, KILL_SEEN_S)


async def transfer_fails(scene: Scene) -> None:
    """Every write of one prefill rank, for a while; some land late."""
    fault = scene.draw.choice([Fault.FAIL, Fault.LATE])
    scene.cluster.writes(fault, _victim(scene, "prefill"))
    await asyncio.sleep(1.5)
    scene.cluster.writes(None)


# --- the router ---------------------------------------------------------------------------------


async def router_killed(scene: Scene) -> None:
    assert scene.router is not None
    await scene.router.kill()
    await _release_soon(scene)
    await scene.forgotten(GRACE_S)


def _victim(scene: Scene, group: str) -> RankId:
    return scene.seen.prefill if group == "prefill" else scene.seen.decode


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """``verdict`` judges the request it was aimed at; all others must come to a good end."""

    name: str
    fire: Fire
    verdict: Verdict = check.whole
    phases: tuple[Phase, ...] = tuple(Phase)
    cuts: bool = False  # needs namespaces
    second_router: bool = False
    excuses: bool = False  # no rank may be left: others too may end with a reason


def _left(got: Got, reference: Got) -> str:
    return check.ended("LEFT", got, reference)


def _late(got: Got, reference: Got) -> str:
    return check.ended("DEADLINE_EXCEEDED", got, reference)


def _unreachable(got: Got, reference: Got) -> str:
    return check.ended("UNAVAILABLE", got, reference)


DEADLINE = "deadline passes"
EVENTS = (
    Event("client disconnects", disconnect, _left),
    Event("abort by id", abort, check.aborted),
    Event(DEADLINE, deadline, _late),
    Event("prefill killed", killed("prefill")),
    Event("prefill stopped and woken", stopped("prefill")),
    Event("prefill stopped for good", stopped_for_good("prefill")),
    Event("prefill cut off and healed", cut_off("prefill"), cuts=True),
    Event("decode killed", killed("decode")),
    Event("decode stopped and woken", stopped("decode")),
    Event("decode stopped for good", stopped_for_good("decode")),
    Event("decode cut off and healed", cut_off("decode"), cuts=True),
    Event("transfer fails", transfer_fails),
    Event("both sides restart", both_restart),
    Event("every rank restarts", all_restart, check.whole_or_excused, excuses=True),
    Event("router killed", router_killed, _unreachable, second_router=True),
)
