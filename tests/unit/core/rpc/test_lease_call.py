"""Renewals over real loopback gRPC: answered beside the step loop, and only by the rank meant."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from core.errors import RankLost
from core.lease import Health
from core.rpc.lease import lease_line
from core.rpc.service import CHANNEL_OPTIONS, LEASE, SERVER_OPTIONS, SERVICE, path
from tests.support.eventually import run_tidy
from tests.support.step_thread import serving
from tests.support.wires import incarnation

STUCK = Health(step=3, turn=9, busy_s=12.5, doing="in 'launch' of step 3")


def test_a_rank_answers_with_its_health_though_its_step_loop_hangs():
    heard: list[str] = []

    async def main() -> None:
        async with serving(on_renewal=heard.append) as rank:
            rank.deaf = True
            rank.healths = [STUCK]
            async with lease_line(rank.info.incarnation, "s1") as renew:
                assert await renew(5.0) == STUCK
                assert (await renew(5.0)).busy_s == 0.0
            assert heard == ["s1", "s1"]
            assert not rank.events

    run_tidy(main)


def test_another_life_of_the_rank_does_not_take_the_renewal():
    heard: list[str] = []

    async def main() -> None:
        async with serving(nonce="n1", on_renewal=heard.append) as rank:
            earlier = incarnation(endpoint=rank.info.incarnation.endpoint, nonce="n0")
            async with lease_line(earlier, "s1") as renew:
                with pytest.raises(RankLost, match=r"this is .*#n1, not #n0"):
                    await renew(5.0)
        assert not heard

    run_tidy(main)


def test_nobody_at_all_is_lost_and_a_line_outlives_a_failure():
    async def main() -> None:
        async with lease_line(incarnation(endpoint="127.0.0.1:1"), "s1") as renew:
            for _ in range(2):
                with pytest.raises(RankLost, match="UNAVAILABLE"):
                    await renew(5.0)

    run_tidy(main)


def test_a_rank_that_says_nothing_times_out():
    async def say_nothing(*_: object) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def main() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        mute = {LEASE: grpc.unary_unary_rpc_method_handler(say_nothing)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, mute),))
        endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with lease_line(incarnation(endpoint=endpoint), "s1") as renew:
            with pytest.raises(RankLost, match=r"^timed out$"):
                await renew(0.5)
        await server.stop(0)

    run_tidy(main)


def test_a_malformed_renewal_is_refused():
    heard: list[str] = []

    async def main() -> None:
        async with (
            serving(on_renewal=heard.append) as rank,
            grpc.aio.insecure_channel(
                rank.info.incarnation.endpoint, options=CHANNEL_OPTIONS
            ) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="not a Renewal"):
                await channel.unary_unary(path(LEASE))(b"\xc1", timeout=5)
        assert not heard

    run_tidy(main)
