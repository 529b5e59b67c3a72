"""A dump over real loopback gRPC, from a rank whose step loop answers and from one that hangs."""

from __future__ import annotations

import pytest

from core.errors import RankLost
from core.rpc.client import ask_dump
from core.rpc.server import ServerLimits
from tests.support.eventually import run_tidy
from tests.support.step_thread import serving
from tests.support.wires import incarnation

IMPATIENT = ServerLimits(queues_timeout_s=0.05)


def test_a_dump_has_the_queues_from_the_step_loop():
    async def main() -> None:
        async with serving() as rank:
            dump = await ask_dump(rank.info.incarnation)
            assert dump.incarnation == rank.info.incarnation
            assert dump.queues is not None
            assert dump.queues.pages.whole
            assert dump.note == ""

    run_tidy(main)


def test_a_step_loop_that_hangs_still_gives_stacks():
    async def main() -> None:
        async with serving(IMPATIENT) as rank:
            rank.deaf = True
            dump = await ask_dump(rank.info.incarnation)
            assert dump.queues is None
            assert dump.note == "the step loop did not show its queues in 0.05 s"
            assert any("self._queue.get()" in thread.stack for thread in dump.threads)

    run_tidy(main)


def test_another_life_of_a_rank_and_nobody_at_all_are_lost():
    async def main() -> None:
        async with serving(nonce="n1") as rank:
            earlier = incarnation(endpoint=rank.info.incarnation.endpoint, nonce="n0")
            with pytest.raises(RankLost, match=r"looked for .*#n0 and found .*#n1"):
                await ask_dump(earlier)
        with pytest.raises(RankLost, match="gave no dump"):
            await ask_dump(incarnation(endpoint="127.0.0.1:1"))

    run_tidy(main)
