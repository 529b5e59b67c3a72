"""A connection for each stream that runs, taken from a stack of idle ones.

httpx's own pool looks at every connection whenever a request comes or goes: with hundreds in flight
the load generator would measure that. Here each connection is a pool of its own.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import httpx

# Servers close idle connections, uvicorn after 5 s: ours go first, so that no request meets one.
_KEEP_ALIVE_S = 2.0


class StackTransport(httpx.AsyncBaseTransport):
    """Gives a request the connection that went idle last, or a new one."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        # slow to make: one for all
        self._tls = httpx.create_ssl_context(verify, trust_env=False)
        self._limits = httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_ALIVE_S)
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connection = self._idle.pop() if self._idle else self._new()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Lent(response.stream, connection, self._idle)
        return response

    async def aclose(self) -> None:
        for connection in self._idle:
            await connection.aclose()

    def _new(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=self._limits)


class _Lent(httpx.AsyncByteStream):
    """A response's bytes; closing it gives the connection back."""

    def __init__(
        self,
        stream: httpx.AsyncByteStream,
        connection: httpx.AsyncHTTPTransport,
        idle: list[httpx.AsyncHTTPTransport],
    ) -> None:
        self._stream = stream
        self._connection = connection
        self._idle = idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            yield data

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._idle.append(self._connection)
