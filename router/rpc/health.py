"""grpc.health.v1 with the router's readiness: SERVING means that a request can be answered now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from grpc_health.v1 import health, health_pb2

from router.readiness import Readiness
from router.rpc.errors import Context

log = logging.getLogger(__name__)

WATCH_PERIOD_S = 1.0  # those who watch hear of a change within this; those who check, at once


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # the library has no types
    """The same status for the server as a whole and for each named service."""

    def __init__(self, ready: Callable[[], Awaitable[Readiness]], names: tuple[str, ...]) -> None:
        super().__init__()
        self._ready = ready
        self._names = ("", *names)
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Show what holds now, and follow it from here on."""
        await self._refresh()
        self._follower = asyncio.create_task(self._follow())
        self._follower.add_done_callback(_complain)

    async def stop(self) -> None:
        """Say NOT_SERVING to everybody, for good."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self.enter_graceful_shutdown()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        await self._refresh()
        return await super().Check(request, context)

    async def List(
        self, request: health_pb2.HealthListRequest, context: Context
    ) -> health_pb2.HealthListResponse:
        check = health_pb2.HealthCheckRequest
        return health_pb2.HealthListResponse(
            statuses={n: await self.Check(check(service=n), context) for n in self._names}
        )

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            await self._refresh()

    async def _refresh(self) -> None:
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if (await self._ready()).ready else status.NOT_SERVING
        for name in self._names:
            await self.set(name, now)


def _complain(follower: asyncio.Task[None]) -> None:
    """It ends by cancellation only; anything else is a defect that must be seen."""
    if not follower.cancelled() and (error := follower.exception()):
        log.error("readiness is no longer followed", exc_info=error)
