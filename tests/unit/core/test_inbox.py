"""core.inbox: what is put is taken in order, all at once, whoever waits."""

from __future__ import annotations

import asyncio

import pytest

from core.inbox import Inbox


def test_everything_that_is_there_is_taken_at_once_and_in_order():
    async def main() -> list[list[int]]:
        inbox: Inbox[int] = Inbox()
        inbox.put(1)
        inbox.put(2)
        first = await inbox.take()
        waiting = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        for item in (3, 4):  # the second finds a reader that was told already
            inbox.put(item)
        return [first, await waiting, inbox.rest()]

    assert asyncio.run(main()) == [[1, 2], [3, 4], []]


def test_a_reader_that_is_cancelled_takes_nothing():
    async def main() -> list[int]:
        inbox: Inbox[int] = Inbox()
        waiting = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        inbox.put(1)
        return await inbox.take()

    assert asyncio.run(main()) == [1]


def test_an_item_survives_a_reader_that_is_cancelled_after_it_was_told():
    async def main() -> list[int]:
        inbox: Inbox[int] = Inbox()
        waiting = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        inbox.put(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return inbox.rest()

    assert asyncio.run(main()) == [1]
