"""A request body larger than the limit is refused before it is read into memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.openai.errors import error_body, json_response

_MIB = 1 << 20


class BodyLimit:
    """ASGI middleware: 413 by the announced length, or by the bytes that came."""

    def __init__(self, app: ASGIApp, limit_mib: int) -> None:
        self._app = app
        self._limit = limit_mib * _MIB
        self._message = f"the body is larger than {limit_mib} MiB (router.body_limit_mib)"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _announced(scope) > self._limit:
            await json_response(error_body(413, self._message), 413)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise HTTPException(413, self._message)
            return message

        await self._app(scope, counted, send)


def _announced(scope: Scope) -> int:
    """The content-length, 0 when there is none."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
