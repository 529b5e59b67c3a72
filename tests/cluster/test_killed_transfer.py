"""A transfer process that is killed during a handoff: the request notices nothing."""

from __future__ import annotations

import os
import signal

import pytest

from core.config import RankSpec
from core.wire import Role
from disagg.transport.mooncake import MooncakeTransport
from tests.support.eventually import eventually, run_tidy
from tests.support.pd_hosts import pd_hosts
from tests.support.tcp_sockets import CLOSE_WAIT, ESTABLISHED, sockets
from tests.support.tiny_models import TINY_MOE

pytestmark = pytest.mark.cluster
PROMPTS = [[100 + (start + 7 * i) % 3000 for i in range(300)] for start in range(0, 3000, 300)]


class Wire:
    """Opens the transports of both ranks; ``kill`` ends a process as soon as KV moves."""

    def __init__(self):
        self.ends = {}
        self.doomed = None  # the role whose process dies when the next write begins

    def open(self, spec: RankSpec):
        wire = self

        class Watched(MooncakeTransport):
            def _enter(self):
                child = super()._enter()  # found alive: the death comes within the write
                if wire.doomed is not None:
                    victim, wire.doomed = wire.doomed, None
                    os.kill(wire.ends[victim].pid, signal.SIGKILL)
                return child

        self.ends[spec.role] = Watched(spec.host)
        return self.ends[spec.role]


@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_the_same_tokens_come_out_and_the_room_is_not_given_up(side):
    wire = Wire()

    async def main() -> None:
        async with pd_hosts(
            TINY_MOE, transport=wire.open, local_prefill="off", checksum="all"
        ) as pair:
            calm = [(await pair.tokens(prompt, 6)).ids for prompt in PROMPTS[:2]]
            report = await pair.transfers(Role.DECODE)
            assert (report.fences, report.retries) == (0, 0)
        async with pd_hosts(
            TINY_MOE, transport=wire.open, local_prefill="off", checksum="all"
        ) as pair:
            first = (await pair.tokens(PROMPTS[0], 6)).ids
            before = wire.ends[side].pid
            wire.doomed = side
            second = (await pair.tokens(PROMPTS[1], 6)).ids
            assert [first, second] == calm
            await eventually(lambda: wire.ends[side].pid != before)
            report = await pair.transfers(Role.DECODE)
            assert report.failed == {}
            assert report.retries >= 1
            assert report.checked == 2
            await pair.at_rest()

    run_tidy(main)


def test_a_decode_rank_whose_process_died_at_rest_has_a_new_address_for_the_next_request():
    wire = Wire()

    async def main() -> None:
        async with pd_hosts(TINY_MOE, transport=wire.open, local_prefill="off") as pair:
            end = wire.ends[Role.DECODE]
            before, address = end.pid, end.address
            os.kill(before, signal.SIGKILL)
            await eventually(lambda: end.pid != before)
            assert end.address != address
            assert len((await pair.tokens(PROMPTS[0], 6)).ids) == 6
            report = await pair.transfers(Role.DECODE)
            assert (report.fences, report.retries, report.failed) == (1, 0, {})

    run_tidy(main)


def test_a_prefill_rank_that_is_told_of_a_fence_keeps_no_connection_to_the_dead_engine():
    wire = Wire()

    async def main() -> None:
        async with pd_hosts(TINY_MOE, transport=wire.open, local_prefill="off") as pair:
            await pair.tokens(PROMPTS[0], 6)
            prefill, decode = wire.ends[Role.PREFILL], wire.ends[Role.DECODE]
            connected, address = prefill.pid, decode.address
            assert sockets(connected, ESTABLISHED) > 0
            os.kill(decode.pid, signal.SIGKILL)
            await eventually(lambda: decode.address != address)
            await eventually(lambda: prefill.pid != connected)
            assert sockets(prefill.pid, CLOSE_WAIT) == 0
            assert len((await pair.tokens(PROMPTS[1], 6)).ids) == 6

    run_tidy(main)
