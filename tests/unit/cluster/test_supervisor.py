from __future__ import annotations

import asyncio

import pytest

from cluster.reconcile import Phase
from core.errors import OperatorError, RequestError
from core.wire import RankId
from router.replicas import MemberState
from tests.support.eventually import eventually
from tests.support.supervised import World, running

P0, P1 = RankId(group="prefill", replica=0), RankId(group="prefill", replica=1)
D0 = RankId(group="decode", replica=0)


def test_ranks_join_first_and_serve_when_tested():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            assert sorted(world.tested) == [D0, P0]
            assert world.serving() == {P0, D0}
            first = {m.incarnation.rank: m.state for m in world.lists[0]}
            assert set(first.values()) == {MemberState.JOINING}

    asyncio.run(main())


def test_scaling_up_adds_and_scaling_down_drains_the_newest():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            world.supervisor.scale({"prefill": 2})
            await eventually(lambda: P1 in world.serving())
            world.busy[P1] = asyncio.Event()
            world.supervisor.scale({"prefill": 1})
            await eventually(lambda: world.members().get(P1) is MemberState.DRAINING)
            assert P1 in world.launcher.up, "it still has a request"
            world.busy[P1].set()
            await eventually(lambda: P1 not in world.launcher.up)
            assert world.serving() == {P0, D0}
            assert P1 not in world.members()

    asyncio.run(main())


def test_a_killed_rank_leaves_the_list_and_comes_back_as_another_life():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            before = {m.incarnation for m in world.lists[-1]}
            world.launcher.die(D0)
            await eventually(lambda: D0 not in world.serving())
            await eventually(lambda: D0 in world.serving())
            after = {m.incarnation for m in world.lists[-1]}
            assert len(before & after) == 1

    asyncio.run(main())


def test_a_rank_that_fails_its_test_is_stopped_and_tried_again():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            world.fails[P1] = "no KV arrived"
            world.supervisor.scale({"prefill": 2})
            await eventually(lambda: P1 in world.serving())
            assert world.tested.count(P1) == 2
            assert P1 in world.launcher.stopped
            (state,) = [s for s in world.supervisor.states() if s.rank == P1]
            assert state.problem == "no KV arrived"

    asyncio.run(main())


def test_what_cannot_start_at_first_is_the_operators_to_mend(caplog):
    """And is told by the error alone, not by the log as well."""

    async def main() -> None:
        world = World(prefill=1, decode=1)
        for rank in (P0, D0):
            world.launcher.refuse[rank] = f"no weights for {rank.group}"
        task = asyncio.create_task(world.supervisor.run())
        with pytest.raises(OperatorError) as caught:
            await world.supervisor.all_serving()
        assert str(caught.value).splitlines() == [
            "decode/0/0 did not start: no weights for decode",
            "prefill/0/0 did not start: no weights for prefill",
        ]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert not caplog.records


def test_a_crash_later_on_is_in_the_log(caplog):
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            await world.supervisor.all_serving()
            world.launcher.die(P0)
            await eventually(lambda: caplog.records)

    asyncio.run(main())
    assert caplog.records[0].levelname == "ERROR"


def test_drain_shrinks_the_group_and_the_last_rank_stays():
    async def main() -> None:
        async with running(prefill=2, decode=1) as world:
            world.supervisor.drain(P0)
            await eventually(lambda: P0 not in world.launcher.up)
            assert world.supervisor.desired == {"prefill": 1, "decode": 1}
            assert world.serving() == {P1, D0}
            with pytest.raises(RequestError, match="last of its group"):
                world.supervisor.drain(P1)
            with pytest.raises(RequestError, match="not a serving rank"):
                world.supervisor.drain(P0)

    asyncio.run(main())


@pytest.mark.parametrize("wanted", [{"nobody": 1}, {"prefill": 0}])
def test_bad_scaling_is_refused(wanted):
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            with pytest.raises(RequestError):
                world.supervisor.scale(wanted)
            assert world.supervisor.desired == {"prefill": 1, "decode": 1}

    asyncio.run(main())


def test_scaling_down_while_one_starts_cancels_the_start():
    async def main() -> None:
        async with running(prefill=1, decode=1) as world:
            world.launcher.hold = asyncio.Event()
            world.supervisor.scale({"prefill": 2})
            await eventually(lambda: world.phase(P1) is Phase.STARTING)
            world.supervisor.scale({"prefill": 1})
            await eventually(lambda: world.phase(P1) is None)
            world.launcher.hold.set()
            assert world.serving() == {P0, D0}

    asyncio.run(main())
