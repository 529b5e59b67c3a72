"""A rank that stops as it was told to: nobody calls that a loss worth a warning."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from core.rpc import events
from core.rpc.client import RankClient
from core.rpc.link import Outbox, Pulse, converse, in_order
from core.rpc.peer import PeerLinks
from core.rpc.server import ServerLimits
from core.rpc.service import STOPPING
from tests.support.eventually import eventually, run_tidy
from tests.support.step_thread import serving


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.INFO, "core.rpc.peer")

    def found() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    return found


def test_both_ends_of_a_link_hear_that_its_rank_stops(warnings, caplog):
    async def main() -> None:
        lost: list[str] = []
        links = PeerLinks("decode/0/0", lambda *_: None, lost.append)
        async with serving() as rank:
            peer = links.open(rank.info.incarnation)
            links.send(peer, b"one")
            await eventually(lambda: rank.seen(events.PeerMessage))
        await eventually(lambda: lost == [peer])
        await links.close()

    run_tidy(main)
    ends = [r.getMessage() for r in caplog.records if "is lost" in r.getMessage()]
    assert len(ends) == 2
    assert all(in_order(words) for words in ends), ends
    assert not warnings()


def test_a_link_whose_rank_drops_it_is_a_loss(warnings):
    async def main() -> None:
        lost: list[str] = []
        links = PeerLinks("decode/0/0", lambda *_: None, lost.append)
        async with serving() as rank:
            peer = links.open(rank.info.incarnation)
            links.send(peer, b"one")
            await eventually(lambda: rank.seen(events.PeerMessage))
            rank.server.drop_peer(rank.seen(events.PeerMessage)[0].peer)
            await eventually(lambda: lost == [peer])
        await links.close()

    run_tidy(main)
    assert len(warnings()) == 2


def test_a_session_says_why_it_ended():
    async def main() -> None:
        ended: list[str] = []
        async with serving(ServerLimits(router_grace_s=0.01)) as rank:
            client = await RankClient.connect(
                rank.info.incarnation, "r1", on_lost=lambda: ended.append(client.lost)
            )
            assert client.lost == ""
        await eventually(lambda: ended)
        assert in_order(ended[0])
        await client.close()

    run_tidy(main)


class Ended:
    """A stream whose other side has ended it: a write notices before the reader is told why."""

    def __init__(self) -> None:
        self._written = asyncio.Event()

    async def write(self, frame: bytes) -> None:
        self._written.set()
        raise _status(grpc.StatusCode.INTERNAL, "Internal error from Core")

    async def read(self) -> bytes:
        await self._written.wait()
        for _ in range(20):  # turns of the loop: the write has long failed
            await asyncio.sleep(0)
        raise _status(grpc.StatusCode.ABORTED, STOPPING)


def _status(code: grpc.StatusCode, words: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, words)


def test_why_a_stream_ended_counts_and_not_the_write_that_found_it_ended():
    async def main() -> None:
        outbox = Outbox(100)
        outbox.send(b"late")
        pulse = Pulse(every_s=1.0, silence_s=5.0)
        reason = await converse(Ended(), outbox, lambda _: None, pulse)
        assert in_order(reason), reason

    run_tidy(main)
