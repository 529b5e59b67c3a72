"""Every call shows its key before its request is read; only health may be asked without."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health

from core.errors import Unauthorized
from router.keys import Keys
from router.rpc.errors import Context, answering

_OPEN = f"/{health.SERVICE_NAME}/"


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # the library has no types
    """UNAUTHENTICATED for whoever has no key."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], call: Any
    ) -> Any:  # opaque: grpc's details of a call, and its handler
        if not call.method.startswith(_OPEN):
            try:
                self._keys.caller(authorization(call.invocation_metadata))
            except Unauthorized as error:
                return _refusing(error)
        return await continuation(call)


def authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """What a call shows, if anything."""
    for name, value in metadata or ():
        if name == "authorization" and isinstance(value, str):
            return value
    return None


def _refusing(error: Unauthorized) -> Any:  # opaque: grpc's handler
    async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:
        async with answering(context):
            raise error

    return grpc.stream_stream_rpc_method_handler(refuse)  # it reads no request
