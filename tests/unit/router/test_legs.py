"""router.legs: one leg is read without a task, two with one each; how they end is the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import pytest

from core import wire
from core.errors import RankLost
from router.legs import Arrived, Ended, Legs
from router.replicas import Replica
from tests.support.wires import incarnation, token_request

T = TypeVar("T")


def chunk(offset: int, *, last: bool = False) -> wire.TokenChunk:
    finish = wire.FinishReason.LENGTH if last else None
    return wire.TokenChunk(rid="r", offset=offset, token_ids=(7,), finish=finish)


class Scripted:
    """A client that says what its script has, raises what is an exception in it, or just ends."""

    def __init__(self, *script: wire.TokenChunk | Exception) -> None:
        self.incarnation = incarnation()
        self.closed = False
        self.aborted: list[tuple[str, bool]] = []
        self._script = script

    async def stream(self, request: wire.TokenRequest) -> AsyncGenerator[wire.TokenChunk, None]:
        try:
            for item in self._script:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True

    def abort(self, rid: str, *, done: bool = False) -> None:
        self.aborted.append((rid, done))


def legs_of(*clients: Scripted) -> Legs:
    roles = (wire.Role.UNIFIED,) if len(clients) == 1 else (wire.Role.PREFILL, wire.Role.DECODE)
    replicas = tuple(Replica(c, role) for c, role in zip(clients, roles, strict=True))
    return Legs(replicas, token_request("r", clients[0].incarnation))


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await work()

    return asyncio.run(main())


async def all_of(legs: Legs) -> list[Arrived | Ended]:
    async with legs:
        events = []
        while legs.running:
            events.append(await legs.next())
        return events


async def until(legs: Legs, count: int) -> AsyncGenerator[None, None]:
    """Reads so many events and then stands, as a dispatcher does at each chunk it gives."""
    async with legs:
        for _ in range(count):
            await legs.next()
        yield


def test_a_leg_that_is_alone_needs_no_task():
    async def work() -> list[Arrived | Ended]:
        async with legs_of(Scripted(chunk(0))):
            assert len(asyncio.all_tasks()) == 1
        return await all_of(legs_of(Scripted(chunk(0), chunk(1, last=True))))

    *arrived, ended = run(work)
    assert [event.chunk.offset for event in arrived] == [0, 1]
    assert (type(ended), ended.error) == (Ended, None)


@pytest.mark.parametrize(("read", "aborted"), [(1, [("r", True)]), (2, [])])
def test_a_leg_is_told_that_it_is_enough_unless_it_has_said_all(read, aborted):
    client = Scripted(chunk(0), chunk(1, last=True))

    async def work() -> bool:
        async with aclosing(until(legs_of(client), read)) as reading:
            await anext(reading)
        return client.closed  # now, and not only when the event loop ends

    assert run(work)
    assert client.aborted == aborted


@pytest.mark.parametrize("others", [(), (Scripted(chunk(0, last=True)),)])
def test_a_stream_that_ends_without_a_reason_is_a_lost_rank(others):
    events = run(lambda: all_of(legs_of(Scripted(chunk(0)), *others)))
    errors = [event.error for event in events if isinstance(event, Ended)]
    assert [type(error) for error in errors if error is not None] == [RankLost]
    assert len(errors) == 1 + len(others)


def test_a_defect_is_not_swallowed():
    async def one() -> None:
        await all_of(legs_of(Scripted(chunk(0), ValueError("a defect"))))

    with pytest.raises(ValueError, match="a defect"):
        run(one)
    two = (Scripted(ValueError("a defect")), Scripted(chunk(0, last=True)))
    events = run(lambda: all_of(legs_of(*two)))
    assert any(isinstance(e, Ended) and isinstance(e.error, ValueError) for e in events)
