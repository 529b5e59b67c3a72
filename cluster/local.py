"""Ranks in this process: each on the caller's event loop, with a step thread of its own.

For tests and for embedding. The ranks talk over the same gRPC and KV transport as on Ray.
"""

from __future__ import annotations

import asyncio

from core.config import RankSpec
from core.wire import RankId, RankInfo
from worker.host import RankHost


class LocalLauncher:
    """Implements Launcher."""

    def __init__(self) -> None:
        self._hosts: dict[RankId, RankHost] = {}
        self._gone: dict[RankId, asyncio.Event] = {}

    async def open(self) -> None:
        """Nothing to start."""

    async def start(self, spec: RankSpec) -> RankInfo:
        """See Launcher."""
        gone = self._gone[spec.rank] = asyncio.Event()
        loop = asyncio.get_running_loop()

        def crashed() -> None:
            loop.call_soon_threadsafe(gone.set)

        host = self._hosts[spec.rank] = await RankHost.start(spec, on_crash=crashed)
        return host.info

    async def gone(self, rank: RankId) -> str:
        """Until its step loop dies."""
        await self._gone[rank].wait()
        await self.stop(rank)
        return "its step loop died"

    async def stop(self, rank: RankId) -> None:
        """See Launcher."""
        if host := self._hosts.pop(rank, None):
            await host.stop()

    async def kill(self, rank: RankId) -> None:
        """There is no process of its own to end."""
        await self.stop(rank)

    async def close(self) -> None:
        """Nothing is left."""
