"""Many writers, one reader, one event loop: items in order, and all that are there at once."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue without a bound whose reader is woken once for all that came meanwhile.

    Every token of every stream passes two of these: asyncio.Queue would take twice the time.
    """

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[T]:
        """All items, at least one; waits while there is none. Cancelled, it takes nothing."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.rest()

    def rest(self) -> list[T]:
        """What is there now, perhaps nothing."""
        items, self._items = self._items, []
        return items
