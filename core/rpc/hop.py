"""From any thread to one callback on an event loop: in order, one wake-up for many items."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Hop(Generic[T]):
    """``put`` from any thread; ``handle`` runs on the loop.

    What is put before the loop gets round to it shares one wake-up, so a step that delivers to
    several receivers interrupts the loop once. ``close`` must be called on the loop before it
    ends; later items are dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[T], None]) -> None:
        self._loop = loop
        self._handle = handle
        self._lock = threading.Lock()
        self._items: list[T] = []
        self._closed = False

    def put(self, item: T) -> None:
        with self._lock:
            if self._closed:
                return
            self._items.append(item)
            if len(self._items) == 1:
                self._loop.call_soon_threadsafe(self._drain)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._items.clear()

    def _drain(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        for item in items:
            self._handle(item)
