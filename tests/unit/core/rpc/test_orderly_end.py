"""A rank that stops as it was told to: nobody calls that a loss worth a warning."""

from __future__ import annotations

import logging

import pytest

from core.rpc import events
from core.rpc.client import RankClient
from core.rpc.link import in_order
from core.rpc.peer import PeerLinks
from core.rpc.server import ServerLimits
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
