"""Sessions over real loopback gRPC, with a step loop in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import grpc
import msgspec
import pytest

from core import wire
from core.codec import to_rank_codec
from core.errors import PreflightError, RankLost
from core.rpc import client as client_module, events, service
from core.rpc.client import Connector, RankClient, SessionPace
from core.rpc.server import RankServer, ServerLimits
from tests.support.eventually import eventually, run_tidy
from tests.support.step_thread import StepThread, serving
from tests.support.wires import incarnation, token_request

QUICK = SessionPace(connect_timeout_s=2.0, ping_s=0.04, rank_timeout_s=0.6, status_timeout_s=0.2)


def leg(client: RankClient, rid: str, max_new: int = 3) -> AsyncGenerator[wire.TokenChunk, None]:
    request = token_request(rid, client.incarnation, max_new=max_new)
    return cast("AsyncGenerator[wire.TokenChunk, None]", client.stream(request))


async def tokens(client: RankClient, rid: str, max_new: int = 3) -> list[int]:
    async with aclosing(leg(client, rid, max_new)) as chunks:
        return [token async for chunk in chunks for token in chunk.token_ids]


def say_nothing(thread: StepThread, event: events.RankEvent) -> None:
    """Take requests and answer nothing but status."""


def test_a_request_streams_and_updates_the_load():
    async def main() -> None:
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1")
            assert client.info == rank.info
            before = client.load.steps
            assert await tokens(client, "a", 4) == [0, 1, 2, 3]
            assert client.load.steps == before + 1
            (event,) = rank.seen(events.Submitted)
            assert event.router == "r1"
            assert event.request.ids().tolist() == [1, 2, 3]
            await client.close()
            assert not rank.seen(events.Aborted)

    run_tidy(main)


def test_status_comes_from_the_step_loop_and_has_a_deadline():
    async def main() -> None:
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1", pace=QUICK)
            status = await client.status()
            assert status.pages.whole
            assert status.handoffs == {"sending": 2}
            rank.deaf = True
            with pytest.raises(RankLost, match="DEADLINE_EXCEEDED"):
                await client.status()
            # an answer after the deadline harms nobody
            rank.seen(events.StatusAsked)[-1].reply(status)
            await client.close()

    run_tidy(main)


def test_a_status_that_is_awaited_when_the_session_ends_is_a_loss_and_no_cancellation():
    async def main() -> None:
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1")
            rank.deaf = True
            asking = asyncio.create_task(client.status())
            await eventually(lambda: rank.seen(events.StatusAsked))
            await client.close()
            with pytest.raises(RankLost, match="the session was closed"):
                await asking

    run_tidy(main)


def test_leaving_a_stream_early_aborts_it():
    async def main() -> None:
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1")
            rank.answer = say_nothing
            waiting = asyncio.create_task(tokens(client, "a"))
            await eventually(lambda: rank.seen(events.Submitted))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await eventually(lambda: events.Aborted("r1", "a") in rank.events)
            await client.close()

    run_tidy(main)


def test_2000_streams_share_one_session():
    async def main() -> None:
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1")
            answers = await asyncio.gather(*(tokens(client, f"q{i}", i % 5) for i in range(2000)))
            assert all(found == list(range(i % 5)) for i, found in enumerate(answers))
            await client.close()

    run_tidy(main)


def test_another_version_is_refused_and_both_are_named():
    async def main() -> None:
        async with (
            serving() as rank,
            grpc.aio.insecure_channel(
                rank.info.incarnation.endpoint, options=service.CHANNEL_OPTIONS
            ) as channel,
        ):
            call = channel.stream_stream(service.path(service.SESSION))()
            await call.write(to_rank_codec().encode(wire.Hello(version=99, router="r9")))
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
            assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"version {wire.PROTOCOL_VERSION}" in failure.value.details()
            assert "r9 version 99" in failure.value.details()

    run_tidy(main)


@pytest.mark.parametrize("frame", [b"\xc1nonsense", to_rank_codec().encode(wire.Ping())])
def test_a_session_starts_with_hello(frame):
    async def main() -> None:
        async with (
            serving() as rank,
            grpc.aio.insecure_channel(
                rank.info.incarnation.endpoint, options=service.CHANNEL_OPTIONS
            ) as channel,
        ):
            call = channel.stream_stream(service.path(service.SESSION))()
            await call.write(frame)
            with pytest.raises(grpc.aio.AioRpcError, match="starts with Hello"):
                await call.read()

    run_tidy(main)


def test_a_malformed_message_ends_the_session():
    async def main() -> None:
        async with serving(ServerLimits(router_grace_s=0.01)) as rank:
            lost = asyncio.Event()
            client = await RankClient.connect(rank.info.incarnation, "r1", on_lost=lost.set)
            client._outbox.send(msgspec.msgpack.encode({"type": "submit"}))
            await asyncio.wait_for(lost.wait(), 5)
            with pytest.raises(RankLost, match="malformed"):
                await tokens(client, "a")
            await eventually(lambda: events.RouterLost("r1") in rank.events)
            await client.close()

    run_tidy(main)


def test_a_session_that_ends_while_its_first_report_is_written_tells_the_caller():
    hello = to_rank_codec().encode(wire.Hello(version=wire.PROTOCOL_VERSION, router="r1"))

    async def read_all(call) -> None:
        while await call.read() is not grpc.aio.EOF:
            continue  # Welcome, perhaps

    async def end_at_once(rank: StepThread) -> str:
        async with grpc.aio.insecure_channel(
            rank.info.incarnation.endpoint, options=service.CHANNEL_OPTIONS
        ) as channel:
            call = channel.stream_stream(service.path(service.SESSION))()
            await call.write(hello)
            await call.write(b"\xc1nonsense")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(read_all(call), 5)
            return caught.value.code().name

    async def main() -> None:
        async with serving() as rank:
            ends = [await end_at_once(rank) for _ in range(30)]
            assert set(ends) == {"ABORTED"}

    run_tidy(main)


def test_another_incarnation_on_the_same_port_is_not_the_rank():
    async def main() -> None:
        async with serving(nonce="new") as rank:
            old = incarnation(endpoint=rank.info.incarnation.endpoint, nonce="old")
            with pytest.raises(RankLost, match=r"#old and found .*#new"):
                await RankClient.connect(old, "r1")

    run_tidy(main)


def test_nobody_there():
    async def main() -> None:
        with pytest.raises(RankLost, match="UNAVAILABLE"):
            await RankClient.connect(incarnation(endpoint="127.0.0.1:1"), "r1", pace=QUICK)

    run_tidy(main)


def test_a_port_that_is_taken_is_the_operators_business():
    async def main() -> None:
        async with serving() as rank:
            taken = int(rank.info.incarnation.endpoint.rpartition(":")[2])
            with pytest.raises(PreflightError, match=str(taken)):
                RankServer().bind(port=taken)

    run_tidy(main)


def test_pings_keep_an_idle_session():
    async def main() -> None:
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1", pace=QUICK)
            await eventually(lambda: client.load.steps > 20)  # beyond the time-out
            assert client.alive
            await client.close()
            with pytest.raises(RankLost, match="closed"):
                await tokens(client, "later")

    run_tidy(main)


def test_a_long_step_is_no_silence():
    """The rank's event loop speaks for it while the step loop is busy."""

    async def main() -> None:
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1", pace=QUICK)
            rank.deaf = True
            asked = asyncio.get_running_loop().time()
            late = asked + 2 * QUICK.rank_timeout_s
            await eventually(lambda: asyncio.get_running_loop().time() > late)
            assert client.alive
            rank.deaf = False
            assert await tokens(client, "a")
            await client.close()

    run_tidy(main)


def test_closing_a_session_ends_its_streams_without_a_loss():
    async def main() -> None:
        async with serving() as rank:
            losses: list[str] = []
            client = await RankClient.connect(
                rank.info.incarnation, "r1", on_lost=lambda: losses.append("lost")
            )
            rank.answer = say_nothing
            waiting = asyncio.create_task(tokens(client, "a"))
            await eventually(lambda: rank.seen(events.Submitted))
            await client.close()
            with pytest.raises(RankLost, match="closed"):
                await waiting
            assert losses == []

    run_tidy(main)


def test_a_defect_in_what_reads_a_session_is_its_loss_and_in_the_log(caplog):
    def broken(_: bytes) -> None:
        raise KeyError("defect")

    async def main() -> None:
        lost = asyncio.Event()
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1", on_lost=lost.set)
            client._on_frame = broken
            asked = asyncio.create_task(tokens(client, "a"))
            await eventually(asked.done)
            assert lost.is_set()
            assert "a defect" in str(asked.exception())
            await client.close()

    run_tidy(main)
    assert "KeyError: 'defect'" in caplog.text


def test_a_stopped_rank_is_lost_at_once():
    async def main() -> None:
        lost = asyncio.Event()
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1", on_lost=lost.set)
        await asyncio.wait_for(lost.wait(), 2)
        with pytest.raises(RankLost, match="stopping"):
            await tokens(client, "a")
        await client.close()
        assert not rank.seen(events.RouterLost)

    run_tidy(main)


def test_a_router_is_lost_after_its_grace():
    async def main() -> None:
        async with serving(ServerLimits(router_grace_s=0.1)) as rank:
            gone = await RankClient.connect(rank.info.incarnation, "gone")
            back = await RankClient.connect(rank.info.incarnation, "back")
            late = await RankClient.connect(rank.info.incarnation, "late")
            await gone.close()
            await back.close()
            back = await RankClient.connect(rank.info.incarnation, "back")
            await late.close()
            await eventually(lambda: events.RouterLost("late") in rank.events)
            assert rank.seen(events.RouterLost) == [
                events.RouterLost("gone"),
                events.RouterLost("late"),
            ]
            assert await tokens(back, "a") == [0, 1, 2]
            await back.close()

    run_tidy(main)


def test_a_second_session_of_a_router_replaces_the_first():
    async def main() -> None:
        async with serving(ServerLimits(router_grace_s=0.01)) as rank:
            lost = asyncio.Event()
            first = await RankClient.connect(rank.info.incarnation, "r1", on_lost=lost.set)
            second = await RankClient.connect(rank.info.incarnation, "r1")
            await asyncio.wait_for(lost.wait(), 5)
            assert await tokens(second, "a") == [0, 1, 2]
            assert not rank.seen(events.RouterLost)
            await first.close()
            await second.close()

    run_tidy(main)


def test_a_mute_router_is_lost():
    async def main() -> None:
        limits = ServerLimits(router_grace_s=0.01, heartbeat_s=0.03, router_silence_s=0.2)
        async with (
            serving(limits) as rank,
            grpc.aio.insecure_channel(
                rank.info.incarnation.endpoint, options=service.CHANNEL_OPTIONS
            ) as channel,
        ):
            client = await RankClient.connect(rank.info.incarnation, "talks")
            mute = channel.stream_stream(service.path(service.SESSION))()
            hello = wire.Hello(version=wire.PROTOCOL_VERSION, router="mute")
            await mute.write(to_rank_codec().encode(hello))
            await eventually(lambda: rank.seen(events.RouterLost))
            assert rank.seen(events.RouterLost) == [events.RouterLost("mute")]
            assert client.alive
            mute.cancel()
            await client.close()

    run_tidy(main)


def test_a_router_asks_for_a_report_with_each_of_its_heartbeats():
    """However many requests it has sent: counts of handoffs come with the answers alone."""

    async def main() -> None:
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1", pace=QUICK)

            async def keep_busy() -> None:
                while len(rank.seen(events.Pinged)) < 5:
                    await tokens(client, "a")

            await asyncio.wait_for(keep_busy(), 5)
            await client.close()

    run_tidy(main)


def test_a_router_that_does_not_read_loses_its_session_and_blocks_nobody():
    async def main() -> None:
        limits = ServerLimits(router_grace_s=0.01, outbox_bytes=2**20)
        async with (
            serving(limits) as rank,
            grpc.aio.insecure_channel(
                rank.info.incarnation.endpoint, options=service.CHANNEL_OPTIONS
            ) as channel,
        ):
            slow = channel.stream_stream(service.path(service.SESSION))()
            hello = wire.Hello(version=wire.PROTOCOL_VERSION, router="slow")
            await slow.write(to_rank_codec().encode(hello))
            await slow.read()
            client = await RankClient.connect(rank.info.incarnation, "quick")
            chunk = wire.TokenChunk(rid="a", offset=0, token_ids=(70_000,) * 20_000)
            big = wire.StepReport(chunks=(chunk,), load=wire.LoadReport())
            for _ in range(400):  # 40 MB: far beyond what sockets and windows hold
                rank.server.deliver("slow", big)
                await asyncio.sleep(0)
            await eventually(lambda: events.RouterLost("slow") in rank.events)
            assert await tokens(client, "a") == [0, 1, 2]
            await client.close()
            slow.cancel()

    run_tidy(main)


def test_each_session_of_a_connector_has_its_own_router_id():
    async def main() -> None:
        async with serving() as rank:
            connect = Connector("router-1")
            first = await connect(rank.info.incarnation, lambda: None)
            second = await connect(rank.info.incarnation, lambda: None)
            await tokens(first, "a")
            await tokens(second, "b")
            routers = {event.router for event in rank.seen(events.Submitted)}
            assert routers == {"router-1.1", "router-1.2"}
            await first.close()
            await second.close()

    run_tidy(main)


def test_the_client_refuses_a_rank_that_is_too_far_behind(monkeypatch):
    monkeypatch.setattr(client_module, "OUTBOX_BYTES", 100)

    async def main() -> None:
        async with serving() as rank:
            client = await RankClient.connect(rank.info.incarnation, "r1")
            with pytest.raises(RankLost, match="too slowly"):
                await asyncio.gather(*(tokens(client, f"q{i}") for i in range(10)))
            await client.close()

    run_tidy(main)
