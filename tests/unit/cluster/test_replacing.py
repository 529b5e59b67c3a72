"""Ranks whose lease says that they are to be replaced."""

from __future__ import annotations

import asyncio

from cluster.reconcile import Phase
from core.wire import Incarnation, RankId
from router.replicas import MemberState
from tests.support.eventually import eventually, run_tidy
from tests.support.supervised import World, running

P0, P1 = RankId(group="prefill", replica=0), RankId(group="prefill", replica=1)
D0 = RankId(group="decode", replica=0)
SILENT = "no answer for 10 s"


def life(world: World, rank: RankId) -> Incarnation:
    return next(m.incarnation for m in world.lists[-1] if m.incarnation.rank == rank)


def test_a_silent_rank_is_killed_and_another_life_takes_its_place():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            before = life(world, D0)
            world.leases[D0].set_result(SILENT)
            await eventually(lambda: D0 not in world.members())
            await eventually(lambda: D0 in world.serving())
            assert world.launcher.killed == [D0]
            assert life(world, D0) != before
            state = world.state(D0)
            assert (state.crashes, state.problem) == (1, SILENT)
            assert not world.leases[D0].done(), "the new life has no lease"

    run_tidy(main)


def test_routers_hear_of_the_loss_before_the_process_has_ended():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            ended = asyncio.Event()
            kill = world.launcher.kill
            known: list[bool] = []  # to routers, when the killing began

            async def slow_kill(rank: RankId) -> None:
                known.append(D0 in world.members())
                await ended.wait()
                await kill(rank)

            world.launcher.kill = slow_kill
            world.leases[D0].set_result(SILENT)
            await eventually(lambda: known)
            assert known == [False]
            assert D0 in world.launcher.up
            assert world.launcher.lives == 2, "a second life began beside the first"
            ended.set()
            await eventually(lambda: D0 in world.serving())

    run_tidy(main)


def test_a_rank_that_falls_silent_in_its_first_test_is_tried_again():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            world.hangs[P1] = asyncio.Event()
            world.supervisor.scale({"prefill": 2})
            await eventually(lambda: world.phase(P1) is Phase.TESTING)
            await eventually(lambda: P1 in world.tested)
            world.hangs.pop(P1)
            world.leases[P1].set_result(SILENT)
            await eventually(lambda: P1 in world.serving())
            assert world.launcher.killed == [P1]
            assert world.tested.count(P1) == 2

    run_tidy(main)


def test_a_rank_that_hangs_while_it_drains_is_ended_and_not_started_again():
    async def main() -> None:
        async with running(prefill=2, decode=1) as world:
            world.busy[P1] = asyncio.Event()
            world.supervisor.scale({"prefill": 1})
            await eventually(lambda: world.members().get(P1) is MemberState.DRAINING)
            world.leases[P1].set_result("in one step for 61 s")
            await eventually(lambda: world.phase(P1) is None)
            assert P1 not in world.launcher.up
            assert world.launcher.killed == [P1]
            assert world.serving() == {P0, D0}

    run_tidy(main)


def test_a_rank_that_dies_is_not_killed_by_its_lease_as_well():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            lease = world.leases[D0]
            world.launcher.die(D0)
            await eventually(lease.cancelled)
            await eventually(lambda: D0 in world.serving())
            assert not world.launcher.killed

    run_tidy(main)


def test_lives_say_when_a_rank_is_tried_again_and_what_is_wrong_with_one_that_is_up():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            world.launcher.refuse[D0] = "no memory"
            world.leases[D0].set_result(SILENT)
            await eventually(lambda: (s := world.state(D0)) and s.crashes == 2)
            doubts = {P0: "no answer for 3 s"}
            decode, prefill = world.supervisor.lives(lambda life: doubts[life.rank])
            assert (decode.phase, decode.crashes, decode.problem) == (Phase.RESTING, 2, "no memory")
            assert decode.retry_s is not None
            assert 0.0 < decode.retry_s <= 0.8
            assert decode.doubt == ""
            assert (prefill.phase, prefill.retry_s) == (Phase.SERVING, None)
            assert prefill.doubt == "no answer for 3 s"

    run_tidy(main)
