"""Links between ranks, over real loopback gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.rpc import events
from core.rpc.peer import LinkPace, PeerLinks
from core.rpc.server import ServerLimits
from core.wire import Incarnation
from tests.support.eventually import eventually, run_tidy
from tests.support.step_thread import StepThread, serving
from tests.support.wires import incarnation

QUICK = LinkPace(heartbeat_s=0.04, silence_s=0.6)


class Calling:
    """The decode side: what its links brought."""

    def __init__(self, pace: LinkPace) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.lost: list[str] = []
        self.broken = False
        self.links = PeerLinks("decode/0/0", self._hear, self.lost.append, pace=pace)

    def send(self, target: Incarnation, data: bytes) -> str:
        peer = self.links.open(target)
        self.links.send(peer, data)
        return peer

    def _hear(self, peer: str, data: bytes) -> None:
        if self.broken:
            raise KeyError("defect")
        self.heard.append((peer, data))


@asynccontextmanager
async def calling(pace: LinkPace | None = None) -> AsyncIterator[Calling]:
    side = Calling(pace or LinkPace())
    yield side
    await side.links.close()


def echo(thread: StepThread, event: events.RankEvent) -> None:
    if isinstance(event, events.PeerMessage):
        thread.server.deliver_peer(event.peer, b"re:" + event.data)


def test_messages_go_both_ways_in_order_from_any_thread():
    async def main() -> None:
        async with serving() as rank, calling() as side:
            rank.answer = echo
            sent = [f"m{i}".encode() for i in range(200)]

            def send_all() -> set[str]:
                return {side.send(rank.info.incarnation, data) for data in sent}

            (peer,) = await asyncio.to_thread(send_all)
            await eventually(lambda: len(side.heard) == 200)
            assert side.heard == [(peer, b"re:" + data) for data in sent]
            assert [event.data for event in rank.seen(events.PeerMessage)] == sent
            (answering,) = {event.peer for event in rank.seen(events.PeerMessage)}
            assert "decode/0/0" in answering
        assert side.lost == []

    run_tidy(main)


def test_heartbeats_keep_an_idle_link():
    async def main() -> None:
        async with serving(ServerLimits(peer_pace=QUICK)) as rank, calling(QUICK) as side:
            rank.answer = echo
            side.send(rank.info.incarnation, b"one")
            await eventually(lambda: side.heard)
            loop = asyncio.get_running_loop()
            late = loop.time() + 2 * QUICK.silence_s
            await eventually(lambda: loop.time() > late)
            side.send(rank.info.incarnation, b"two")
            await eventually(lambda: len(side.heard) == 2)
            assert side.lost == []
            assert not rank.seen(events.PeerLost)

    run_tidy(main)


def test_a_stopped_rank_is_lost_once_and_gets_a_new_id_next_time():
    async def main() -> None:
        async with calling() as side:
            async with serving() as rank:
                first = side.send(rank.info.incarnation, b"one")
                await eventually(lambda: rank.seen(events.PeerMessage))
            await eventually(lambda: side.lost)
            assert side.lost == [first]
            second = side.send(rank.info.incarnation, b"two")
            assert second != first
            await eventually(lambda: len(side.lost) == 2)  # nobody listens there any more
            assert side.lost == [first, second]

    run_tidy(main)


def test_a_defect_in_what_hears_a_link_is_its_loss_and_in_the_log(caplog):
    async def main() -> None:
        async with serving() as rank, calling() as side:
            rank.answer = echo
            side.broken = True
            first = side.send(rank.info.incarnation, b"one")
            await eventually(lambda: side.lost)
            assert side.lost == [first]
            side.broken = False
            second = side.send(rank.info.incarnation, b"two")
            await eventually(lambda: side.heard)
            assert side.heard == [(second, b"re:two")]

    run_tidy(main)
    assert "KeyError: 'defect'" in caplog.text


def test_a_caller_that_leaves_is_lost():
    async def main() -> None:
        async with serving() as rank:
            async with calling() as side:
                side.send(rank.info.incarnation, b"one")
                await eventually(lambda: rank.seen(events.PeerMessage))
            await eventually(lambda: rank.seen(events.PeerLost))
            (message,), (lost,) = rank.seen(events.PeerMessage), rank.seen(events.PeerLost)
            assert message.peer == lost.peer
            rank.server.deliver_peer(lost.peer, b"too late")
            async with calling() as again:
                again.send(rank.info.incarnation, b"two")
                await eventually(lambda: len(rank.seen(events.PeerMessage)) == 2)
                assert rank.seen(events.PeerMessage)[1].peer != message.peer
                assert again.heard == []

    run_tidy(main)


def test_a_link_to_another_incarnation_is_refused():
    async def main() -> None:
        async with serving(nonce="new") as rank, calling() as side:
            old = incarnation(endpoint=rank.info.incarnation.endpoint, nonce="old")
            peer = side.send(old, b"for the old one only")
            await eventually(lambda: side.lost == [peer])
            assert not rank.seen(events.PeerMessage)

    run_tidy(main)


def test_either_side_can_drop_a_link():
    async def main() -> None:
        async with serving() as rank, calling() as side:
            first = side.send(rank.info.incarnation, b"one")
            await eventually(lambda: rank.seen(events.PeerMessage))
            side.links.drop(first)
            await eventually(lambda: side.lost == [first] and rank.seen(events.PeerLost))
            side.links.send(first, b"into nothing")
            second = side.send(rank.info.incarnation, b"two")
            await eventually(lambda: len(rank.seen(events.PeerMessage)) == 2)
            rank.server.drop_peer(rank.seen(events.PeerMessage)[-1].peer)
            await eventually(lambda: side.lost == [first, second])
            assert [event.data for event in rank.seen(events.PeerMessage)] == [b"one", b"two"]

    run_tidy(main)
