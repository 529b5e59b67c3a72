"""Cluster in this process: every rank on the caller's event loop, with a step thread each.

For tests and for embedding. The ranks talk over the same gRPC and KV transport as on Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from core.config import RankSpec
from core.wire import RankInfo
from worker.host import RankHost

log = logging.getLogger(__name__)


class LocalCluster:
    """Ranks as objects."""

    def __init__(self) -> None:
        self._hosts: dict[str, RankHost] = {}

    async def start(self, specs: Sequence[RankSpec]) -> list[RankInfo]:
        """Start every rank; raises OperatorError as RankHost.start does."""
        for spec in specs:
            self._hosts[str(spec.rank)] = await RankHost.start(spec, on_crash=_crashed)
        return [host.info for host in self._hosts.values()]

    async def watch(self, on_members: Callable[[Sequence[RankInfo]], None]) -> None:
        """Report the ranks once; nobody restarts them here. Runs until cancelled."""
        on_members([host.info for host in self._hosts.values()])
        await asyncio.Event().wait()

    async def stop(self) -> None:
        for host in reversed(self._hosts.values()):
            await host.stop()
        self._hosts.clear()


def _crashed() -> None:
    log.critical("a step loop died; its rank answers no more")
