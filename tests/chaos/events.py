"""What goes wrong: each event is aimed at a request in a phase, and says what it must come to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.wire import RankId
from tests.chaos import check, links
from tests.chaos.burst import burst as burst_of_requests
from tests.chaos.cluster import LEASE_S, RANKS
from tests.chaos.load import Got
from tests.chaos.phases import Sighting
from tests.chaos.rank import Fault
from tests.chaos.scene import AWAY_S, Fire, Scene
from tests.support.eventually import eventually

KILL_SEEN_S = 2.0
BACK_S = 60.0  # until a killed rank has a session again
GRACE_S = 5.0  # until a dead router's requests are gone: 2 s, and the handoffs' end


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
        rank = scene.victim(group)
        scene.cluster.kill(rank)
        scene.cluster.writes(None)
        await scene.noticed(rank, KILL_SEEN_S)

    return fire


def returned(group: str) -> Fire:
    """Killed, and started again where peers and routers knew another life of it."""

    async def fire(scene: Scene) -> None:
        cluster, rank = scene.cluster, scene.victim(group)
        old = cluster.info(rank).incarnation
        cluster.keep_port(rank)
        try:
            cluster.kill(rank)
            cluster.writes(None)
            await scene.noticed(rank, KILL_SEEN_S)
            await eventually(lambda: cluster.session(rank), BACK_S)
        finally:
            cluster.free_port(rank)
        new = cluster.info(rank).incarnation
        if new.endpoint != old.endpoint or new.nonce == old.nonce:
            scene.problems.append(f"{new} did not come back as another life of {old}")

    return fire


def stopped(group: str) -> Fire:
    """Held writes are let go while their process stands still: they go on when it wakes."""

    async def fire(scene: Scene) -> None:
        rank = scene.victim(group)
        pid = scene.cluster.freeze(rank)
        try:
            scene.cluster.writes(None)
            await scene.silence(rank)
        finally:
            scene.cluster.thaw(rank, pid)

    return fire


def stopped_for_good(group: str) -> Fire:
    """Nobody wakes it: its lease runs out, and it is killed and replaced."""

    async def fire(scene: Scene) -> None:
        rank = scene.victim(group)
        pid = scene.cluster.freeze(rank)
        scene.cluster.writes(None)
        await scene.silence(rank)
        try:
            await eventually(lambda: not Path(f"/proc/{pid}").exists(), LEASE_S + GRACE_S)
        except TimeoutError:
            scene.problems.append(f"{rank} still stands, {LEASE_S + GRACE_S:g} s later")
        scene.cluster.frozen.discard(rank)

    return fire


async def both_restart(scene: Scene) -> None:
    """One rank of each role, in any order, the second perhaps while the first comes back."""
    ranks = [scene.victim("prefill"), scene.victim("decode")]
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
    scene.cluster.writes(fault, scene.victim("prefill"))
    await asyncio.sleep(1.5)
    scene.cluster.writes(None)


# --- routers, and callers without end -----------------------------------------------------------


async def router_killed(scene: Scene) -> None:
    """Its clients go to the first router, and to itself once it is back: see the stage."""
    await scene.router.kill()
    await _release_soon(scene)
    await scene.forgotten(GRACE_S)


async def first_router_stopped(scene: Scene) -> None:
    """We, who are the first router, the supervisor and all callers; a child wakes us."""
    scene.cluster.writes(None)
    words = f"kill -STOP {os.getpid()}; sleep {AWAY_S}; kill -CONT {os.getpid()}"
    child = await asyncio.create_subprocess_exec("sh", "-c", words)
    await child.wait()


async def burst(scene: Scene) -> None:
    """More requests than there are places, each whole or asked to come later."""
    scene.cluster.writes(None)
    notes, problems = await burst_of_requests(scene.cluster)
    scene.notes.update(notes)
    scene.problems += problems


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """``verdict`` judges the request it was aimed at, ``others`` all others."""

    name: str
    fire: Fire
    verdict: Verdict = check.whole
    others: Verdict = check.whole
    groups: tuple[str, ...] = ()  # whose rank it strikes: other requests on that are hit, too
    needs: str = ""  # "cut": namespaces, "loss": of packets
    second_router: bool = False  # the request runs through one that may die


def victims(event: Event, seen: Sighting) -> set[RankId]:
    """The ranks it strikes."""
    if EVERY in event.groups:
        return set(RANKS)
    ranks = {"prefill": seen.prefill, "decode": seen.decode}
    return {rank for group in event.groups if (rank := ranks[group])}


def _left(got: Got, reference: Got) -> str:
    return check.ended("LEFT", got, reference)


def _late(got: Got, reference: Got) -> str:
    return check.ended("DEADLINE_EXCEEDED", got, reference)


def _unreachable(got: Got, reference: Got) -> str:
    return check.ended("UNAVAILABLE", got, reference)


EVERY = "every"
P, D, BOTH = ("prefill",), ("decode",), ("prefill", "decode")
DEADLINE = "deadline passes"
EVENTS = (
    Event("client disconnects", disconnect, _left),
    Event("abort by id", abort, check.aborted),
    Event(DEADLINE, deadline, _late),
    Event("prefill killed", killed("prefill"), groups=P),
    Event("prefill returns on its port", returned("prefill"), groups=P),
    Event("prefill stopped and woken", stopped("prefill"), groups=P),
    Event("prefill stopped for good", stopped_for_good("prefill"), groups=P),
    Event("prefill cut off and healed", links.cut_off("prefill"), groups=P, needs="cut"),
    Event("decode killed", killed("decode"), groups=D),
    Event("decode returns on its port", returned("decode"), groups=D),
    Event("decode stopped and woken", stopped("decode"), groups=D),
    Event("decode stopped for good", stopped_for_good("decode"), groups=D),
    Event("decode cut off and healed", links.cut_off("decode"), groups=D, needs="cut"),
    Event("one way: prefill to decode", links.deaf("prefill", "decode"), needs="cut"),
    Event("one way: decode to prefill", links.deaf("decode", "prefill"), needs="cut"),
    Event("one way: router to rank", links.deaf_to_router, needs="cut"),
    Event("one way: rank to router", links.unheard_by_router, needs="cut"),
    Event("lossy link", links.lossy, needs="loss"),
    Event("transfer fails", transfer_fails, groups=P),
    Event("both sides restart", both_restart, groups=BOTH),
    Event("every rank restarts", all_restart, check.whole_or_excused, check.whole_or_excused,
          (EVERY,)),
    Event("first router stopped and woken", first_router_stopped, groups=(EVERY,)),
    Event("router killed and restarted", router_killed, _unreachable, second_router=True),
    Event("burst of 4 x capacity", burst, others=check.whole_or_full, groups=(EVERY,)),
)  # fmt: skip
