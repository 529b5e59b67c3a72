"""What goes wrong: each event is aimed at a request in a phase, and says what it must come to."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import check, links
from tests.chaos.aims import Aim
from tests.chaos.burst import burst as burst_of_requests
from tests.chaos.cluster import LEASE_S, RANKS
from tests.chaos.load import Got
from tests.chaos.rank import Fault
from tests.chaos.scene import AWAY_S, Fire, Scene
from tests.support.eventually import eventually

KILL_SEEN_S = 2.0
BACK_S = 60.0  # until a killed rank has a session again
GRACE_S = 5.0  # until a dead router's requests are gone: 2 s, and the handoffs' end


# --- callers ------------------------------------------------------------------------------------


async def disconnect(scene: Scene) -> None:
    for got in scene.struck.values():
        got.leave()
    await _release_soon(scene)
    await scene.forgotten(GRACE_S)


async def abort(scene: Scene) -> None:
    asked = (scene.client.abort(got.request_id) for got in scene.struck.values())
    if not all(await asyncio.gather(*asked)):
        scene.problems.append("the router does not know a request that is to be aborted")
    await _release_soon(scene)
    await scene.forgotten(GRACE_S)


async def deadline(scene: Scene) -> None:
    """They have passed already; the stage watched the requests until then."""
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
    """``verdict`` judges the requests that were aimed at, ``others`` all others.

    Where it is aimed at requests, with a caller or a router, that is every one of the stage's own
    in a clear phase; where at ranks or links, it does the same to each request.
    """

    name: str
    fire: Fire
    aim: Aim
    verdict: check.Verdict = check.whole
    others: check.Verdict = check.whole
    needs: str = ""  # "cut": namespaces, "loss": of packets

    @property
    def unclear(self) -> check.Verdict:
        """Of a request of the stage's own that was in no clear phase."""
        if self.aim is Aim.ROUTER or self.name == DEADLINE:
            return check.whole_or(self.verdict)
        # it may not have come to the router's door yet, as any other may
        return check.whole if self.aim is Aim.CALLER else self.others

    @property
    def second_router(self) -> bool:
        """Whether its requests run through a router that may die."""
        return self.aim is Aim.ROUTER


def _left(got: Got, reference: Got) -> str:
    return check.ended("LEFT", got, reference)


def _late(got: Got, reference: Got) -> str:
    return check.ended("DEADLINE_EXCEEDED", got, reference)


def _unreachable(got: Got, reference: Got) -> str:
    return check.ended("UNAVAILABLE", got, reference)


P, D = Aim.PREFILL, Aim.DECODE
DEADLINE = "deadline passes"
EVENTS = (
    Event("client disconnects", disconnect, Aim.CALLER, _left),
    Event("abort by id", abort, Aim.CALLER, check.aborted),
    Event(DEADLINE, deadline, Aim.CALLER, _late),
    Event("prefill killed", killed("prefill"), P),
    Event("prefill returns on its port", returned("prefill"), P),
    Event("prefill stopped and woken", stopped("prefill"), P),
    Event("prefill stopped for good", stopped_for_good("prefill"), P),
    Event("prefill cut off and healed", links.cut_off("prefill"), P, needs="cut"),
    Event("decode killed", killed("decode"), D),
    Event("decode returns on its port", returned("decode"), D),
    Event("decode stopped and woken", stopped("decode"), D),
    Event("decode stopped for good", stopped_for_good("decode"), D),
    Event("decode cut off and healed", links.cut_off("decode"), D, needs="cut"),
    Event("one way: prefill to decode", links.deaf("prefill", "decode"), Aim.LINK, needs="cut"),
    Event("one way: decode to prefill", links.deaf("decode", "prefill"), Aim.LINK, needs="cut"),
    Event("one way: router to rank", links.deaf_to_router, Aim.EITHER, needs="cut"),
    Event("one way: rank to router", links.unheard_by_router, Aim.EITHER, needs="cut"),
    Event("lossy link", links.lossy, Aim.EITHER, needs="loss"),
    Event("transfer fails", transfer_fails, P),
    Event("both sides restart", both_restart, Aim.BOTH),
    Event("every rank restarts", all_restart, Aim.EVERYTHING, check.whole_or_excused,
          check.whole_or_excused),
    Event("first router stopped and woken", first_router_stopped, Aim.EVERYTHING),
    Event("router killed and restarted", router_killed, Aim.ROUTER, _unreachable),
    Event("burst of 4 x capacity", burst, Aim.EVERYTHING, others=check.whole_or_full),
)  # fmt: skip
