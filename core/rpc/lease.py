"""The supervisor's end of the Lease call: one channel to one incarnation of a rank."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import msgspec

from core.codec import Codec
from core.errors import RankLost
from core.lease import Health, Renewal
from core.rpc.link import explain
from core.rpc.service import CHANNEL_OPTIONS, LEASE, path
from core.wire import Incarnation

Renew = Callable[[float], Awaitable[Health]]


@asynccontextmanager
async def lease_line(incarnation: Incarnation, supervisor: str) -> AsyncIterator[Renew]:
    """A way to renew, for as long as the context lasts: ``await renew(timeout_s)``.

    It raises RankLost where this incarnation does not answer in time; the next may get through.
    """
    renewals, healths = Codec[Renewal](Renewal), Codec[Health](Health)
    frame = renewals.encode(Renewal(supervisor=supervisor, nonce=incarnation.nonce))
    async with grpc.aio.insecure_channel(incarnation.endpoint, options=CHANNEL_OPTIONS) as channel:
        ask = channel.unary_unary(path(LEASE))

        async def renew(timeout_s: float) -> Health:
            try:
                return healths.decode(await ask(frame, timeout=timeout_s))
            except (grpc.RpcError, grpc.aio.BaseError, msgspec.MsgspecError) as error:
                raise RankLost(_words(error)) from error

        yield renew


def _words(error: Exception) -> str:
    late = grpc.StatusCode.DEADLINE_EXCEEDED
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is late:
        return "timed out"
    return explain(error)
