"""Streams of which only one direction works, or none: the other end is written by hand here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest

from core.codec import to_router_codec
from core.errors import RankLost
from core.rpc import events
from core.rpc.beats import Beats
from core.rpc.client import RankClient, SessionPace
from core.rpc.link import is_beat
from core.rpc.peer import LinkPace, PeerHello, PeerLinks
from core.rpc.server import ServerLimits
from core.rpc.service import CHANNEL_OPTIONS, PEER, SERVICE, SESSION, path
from core.wire import PROTOCOL_VERSION, Incarnation, LoadReport, StepReport, Welcome
from tests.support.eventually import eventually, run_tidy
from tests.support.step_thread import serving
from tests.support.wires import incarnation, rank_info, token_request

QUICK = LinkPace(heartbeat_s=0.05, silence_s=1.0)
Stream = Any  # opaque: a grpc.aio call or a servicer context
End = Callable[[Stream], Awaitable[None]]


async def mute(stream: Stream) -> None:
    """Reads, and says nothing."""
    while await stream.read() is not grpc.aio.EOF:
        continue


async def deaf(stream: Stream) -> None:
    """Beats, and does not hear: what the other end sends is lost."""
    beats = Beats(0.0)
    while True:
        beats.begin(0.0)
        await stream.write(beats.frame())
        await asyncio.sleep(QUICK.heartbeat_s)


async def answers(stream: Stream) -> None:
    """Answers each beat, and begins none."""
    beats = Beats(0.0)
    while (frame := await stream.read()) is not grpc.aio.EOF:
        if is_beat(frame) and beats.hear(frame):
            await stream.write(beats.frame())


@asynccontextmanager
async def answering(end: End) -> AsyncIterator[Incarnation]:
    """A rank whose side of a link, and of a session, is ``end``."""
    server = grpc.aio.server()
    life = incarnation("prefill", endpoint=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")

    running = 0

    async def serve(context: Stream) -> None:
        nonlocal running
        running += 1
        try:
            await end(context)
        finally:
            running -= 1

    async def link(_: object, context: Stream) -> None:
        await context.read()  # PeerHello
        await serve(context)

    async def session(_: object, context: Stream) -> None:
        welcome = Welcome(version=PROTOCOL_VERSION, info=rank_info(life))
        for message in (welcome, StepReport(chunks=(), load=LoadReport())):
            await context.read()  # Hello, and a Ping
            await context.write(Beats(0.0).frame())  # its heartbeats do not wait for the greeting
            await context.write(to_router_codec().encode(message))
        await serve(context)

    handlers = {
        PEER: grpc.stream_stream_rpc_method_handler(link),
        SESSION: grpc.stream_stream_rpc_method_handler(session),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    await server.start()
    try:
        yield life
        await eventually(lambda: not running)  # the caller has left
    finally:
        await server.stop(0.1)


@asynccontextmanager
async def calling(life: Incarnation, end: End) -> AsyncIterator[None]:
    """A rank that opens a link to ``life``; its side of it is ``end``."""
    hello = PeerHello(version=PROTOCOL_VERSION, caller="decode/0/0", target_nonce=life.nonce)
    async with grpc.aio.insecure_channel(life.endpoint, options=CHANNEL_OPTIONS) as channel:
        call = channel.stream_stream(path(PEER))()
        await call.write(msgspec.msgpack.encode(hello))
        running = asyncio.ensure_future(end(call))
        yield
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, grpc.aio.BaseError):
            await running
        call.cancel()


@asynccontextmanager
async def links(lost: list[str]) -> AsyncIterator[PeerLinks]:
    opened = PeerLinks("decode/0/0", lambda *_: None, lost.append, pace=QUICK)
    yield opened
    await opened.close()


async def outlasts(condition: Callable[[], object], seconds: float) -> None:
    """Fail where the condition comes true in this time."""
    with pytest.raises(TimeoutError):
        await eventually(condition, seconds)


@pytest.mark.parametrize("timeout_s", [0.4, 4.5, 60.0])
def test_several_heartbeats_have_room_in_every_time_out(timeout_s):
    session, link = SessionPace.within(timeout_s), LinkPace.within(timeout_s)
    assert (session.rank_timeout_s, link.silence_s) == (timeout_s, timeout_s)
    assert 4 * session.ping_s <= timeout_s
    assert 4 * link.heartbeat_s <= timeout_s
    assert max(session.ping_s, link.heartbeat_s) <= 1.0


@pytest.mark.parametrize("end", [mute, deaf])
def test_the_calling_side_loses_a_link_on_which_it_is_not_heard(end):
    async def main() -> None:
        lost: list[str] = []
        async with answering(end) as life, links(lost) as opened:
            began = asyncio.get_running_loop().time()
            peer = opened.open(life)
            await eventually(lambda: lost == [peer])
            took = asyncio.get_running_loop().time() - began
            assert took >= QUICK.silence_s

    run_tidy(main)


@pytest.mark.parametrize("end", [mute, deaf])
def test_the_answering_side_loses_a_link_on_which_it_is_not_heard(end):
    async def main() -> None:
        limits = ServerLimits(peer_pace=QUICK)
        async with serving(limits) as rank, calling(rank.info.incarnation, end):
            await eventually(lambda: rank.seen(events.PeerLost))

    run_tidy(main)


@pytest.mark.parametrize("end", [mute, deaf])
def test_a_router_loses_a_rank_that_does_not_hear_it(end):
    async def main() -> None:
        lost = asyncio.Event()
        pace = SessionPace(ping_s=QUICK.heartbeat_s, rank_timeout_s=QUICK.silence_s)
        async with answering(end) as life:
            client = await RankClient.connect(life, "r1", pace=pace, on_lost=lost.set)
            waiting = asyncio.ensure_future(anext(client.stream(token_request("a", life))))
            await asyncio.wait_for(lost.wait(), 10)
            assert client.lost == "silent for 1 s"
            with pytest.raises(RankLost, match="silent for 1 s"):
                await waiting
            await client.close()

    run_tidy(main)


def test_an_end_that_only_answers_is_there():
    async def main() -> None:
        lost: list[str] = []
        async with (
            answering(answers) as life,
            links(lost) as opened,
            serving(ServerLimits(peer_pace=QUICK)) as rank,
            calling(rank.info.incarnation, answers),
        ):
            opened.open(life)
            over = lambda: lost or rank.seen(events.PeerLost)  # noqa: E731
            await outlasts(over, 1.5 * QUICK.silence_s)

    run_tidy(main)


def test_an_end_that_stood_still_judges_nobody_before_it_has_read(monkeypatch):
    """The clock of the loop leaps, as it does for a process that was stopped and goes on."""

    async def main() -> None:
        lost: list[str] = []
        loop = asyncio.get_running_loop()
        real, leap = loop.time, [0.0]
        async with answering(answers) as life, links(lost) as opened:
            opened.open(life)
            await outlasts(lambda: lost, 2 * QUICK.heartbeat_s)
            monkeypatch.setattr(loop, "time", lambda: real() + leap[0])
            leap[0] = 7.0
            await outlasts(lambda: lost, 0.5 * QUICK.silence_s)

    run_tidy(main)


def test_heartbeats_overtake_messages_that_wait():
    """A reader that is far behind is lost by what waits for it, not for its late answers."""

    async def main() -> None:
        lost: list[str] = []
        beats_at: list[int] = []

        async def slow(stream: Stream) -> None:
            beats, read = Beats(0.0), 0
            while (frame := await stream.read()) is not grpc.aio.EOF:
                read += 1
                if is_beat(frame):
                    beats_at.append(read)
                    if beats.hear(frame):
                        await stream.write(beats.frame())
                await asyncio.sleep(QUICK.heartbeat_s / 4)

        async with answering(slow) as life, links(lost) as opened:
            peer = opened.open(life)
            for _ in range(100):
                opened.send(peer, bytes(2**19))
            await eventually(lambda: len(beats_at) >= 3)
            assert beats_at[2] < 100
            assert not lost

    run_tidy(main)
