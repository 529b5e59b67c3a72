"""The keeper renews what it is given, and says why it gives a rank up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.keeper import LeaseKeeper
from core.clock import RealClock
from core.config import LeaseConfig
from core.dump import RankDump, ThreadStack
from core.errors import RankLost
from core.lease import Health
from core.rpc.lease import Renew
from core.wire import Incarnation
from tests.support.eventually import eventually, run_tidy
from tests.support.step_thread import serving
from tests.support.wires import incarnation

QUICK = LeaseConfig(renew_s=0.01, lease_s=0.4, stuck_limit_s=60.0)
RANK = incarnation()
STUCK = Health(step=5, turn=5, busy_s=61.0, doing="in 'launch' of step 5")


class Wire:
    """A line on which the test answers: healths in turn, and then silence or well-being."""

    def __init__(self, *healths: Health, silent: bool = False) -> None:
        self.healths = list(healths)
        self.silent = silent
        self.calls: list[tuple[str, float]] = []
        self.open = 0

    @asynccontextmanager
    async def line(self, rank: Incarnation, supervisor: str) -> AsyncIterator[Renew]:
        async def renew(timeout_s: float) -> Health:
            self.calls.append((supervisor, timeout_s))
            if self.healths:
                return self.healths.pop(0)
            if self.silent:
                await asyncio.sleep(timeout_s)
                raise RankLost("DEADLINE_EXCEEDED")
            return Health(step=1, turn=1, busy_s=0.0)

        self.open += 1
        yield renew
        self.open -= 1


async def no_dump(rank: Incarnation) -> RankDump:
    raise RankLost("no dump")


def test_a_rank_that_falls_silent_is_given_up_and_doubted_before():
    async def main() -> None:
        wire = Wire(Health(step=1, turn=1, busy_s=0.0), silent=True)
        keeper = LeaseKeeper(QUICK, RealClock(), wire.line, no_dump)
        holding = asyncio.create_task(keeper.hold(RANK))
        await eventually(lambda: keeper.doubt(RANK))
        assert not holding.done()
        assert (await holding).startswith("no answer for 0 s (DEADLINE_EXCEEDED)")
        assert keeper.doubt(RANK) == ""
        assert not wire.open
        assert len({supervisor for supervisor, _ in wire.calls}) == 1

    run_tidy(main)


def test_a_stuck_rank_is_given_up_with_the_stack_of_its_step_thread(caplog):
    async def ask(rank: Incarnation) -> RankDump:
        threads = (
            ThreadStack(name="grpc-loop", ident=1, stack="  elsewhere"),
            ThreadStack(name="step-loop", ident=2, stack="  in a kernel"),
        )
        return RankDump(
            incarnation=rank, pid=1, uptime_s=1.0, busy=None, stuck_steps=1, steps=(),
            threads=threads,
        )  # fmt: skip

    async def main() -> None:
        keeper = LeaseKeeper(QUICK, RealClock(), Wire(STUCK, STUCK).line, ask)
        assert await keeper.hold(RANK) == "in one step for 61 s, in 'launch' of step 5"

    run_tidy(main)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.getMessage().endswith("its step thread is here:\n  in a kernel")


def test_a_stuck_rank_that_gives_no_stack_is_given_up_all_the_same(caplog):
    async def main() -> None:
        keeper = LeaseKeeper(QUICK, RealClock(), Wire(STUCK, STUCK).line, no_dump)
        assert await keeper.hold(RANK)

    run_tidy(main)
    assert "gives no stack: no dump" in caplog.text


def test_a_rank_that_is_well_is_renewed_until_the_keeper_is_told_to_stop():
    async def main() -> None:
        async with serving(on_renewal=heard.append) as rank:
            keeper = LeaseKeeper(QUICK, RealClock())
            holding = asyncio.create_task(keeper.hold(rank.info.incarnation))
            await eventually(lambda: len(heard) > 3)
            assert not holding.done()
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
        assert len(set(heard)) == 1

    heard: list[str] = []
    run_tidy(main)
