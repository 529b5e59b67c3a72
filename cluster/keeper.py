"""LeaseKeeper: renews the leases of one supervisor's ranks, and says when one is to be replaced."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from cluster.lease import Lease, Verdict
from core.clock import Clock
from core.config import LeaseConfig
from core.dump import RankDump
from core.errors import RankLost
from core.rpc.client import ask_dump
from core.rpc.lease import Renew, lease_line
from core.wire import Incarnation

log = logging.getLogger(__name__)

STEP_THREAD = "step-loop"

Line = Callable[[Incarnation, str], AbstractAsyncContextManager[Renew]]
Ask = Callable[[Incarnation], Awaitable[RankDump]]


class LeaseKeeper:
    """One for each supervisor. The mechanics around cluster/lease.py."""

    def __init__(
        self, limits: LeaseConfig, clock: Clock, line: Line = lease_line, ask: Ask = ask_dump
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._line = line
        self._ask = ask
        self._supervisor = secrets.token_hex(8)
        self._leases: dict[Incarnation, Lease] = {}

    async def hold(self, rank: Incarnation) -> str:
        """Renew a rank's lease until it is to be replaced; why, in words."""
        try:
            async with self._line(rank, self._supervisor) as renew:
                self._leases[rank] = Lease.begun(self._limits, self._clock.now())
                while (lease := await self._turn(rank, renew)).verdict is Verdict.FINE:
                    pass
            if lease.verdict is Verdict.STUCK:
                await self._log_stack(rank, lease)
            return lease.words
        finally:
            self._leases.pop(rank, None)

    def doubt(self, rank: Incarnation) -> str:
        """What makes a rank look bad that is not given up yet; empty where nothing does."""
        lease = self._leases.get(rank)
        return lease.words if lease is not None else ""

    async def _turn(self, rank: Incarnation, renew: Renew) -> Lease:
        """One renewal, and the pause after it where the rank is fine."""
        lease = self._leases[rank]
        patience_s = lease.patience_s
        try:
            health = await renew(patience_s)
        except RankLost as error:
            lease = lease.failed(self._clock.now(), patience_s, str(error))
        else:
            lease = lease.answered(self._clock.now(), health)
        if lease.verdict is Verdict.FINE:
            self._leases[rank] = lease
            await asyncio.sleep(self._limits.renew_s)
            lease = lease.rested(self._clock.now(), self._limits.renew_s)
        self._leases[rank] = lease
        return lease

    async def _log_stack(self, rank: Incarnation, lease: Lease) -> None:
        """The last words of a step thread that hangs, where its rank still gives them."""
        try:
            threads = (await self._ask(rank)).threads
        except RankLost as error:
            log.warning("%s is %s, and gives no stack: %s", rank, lease.words, error)
            return
        stack = next((t.stack for t in threads if t.name == STEP_THREAD), "it has ended")
        log.error("%s is %s; its step thread is here:\n%s", rank, lease.words, stack)
