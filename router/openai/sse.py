"""Server-sent events, and work that stops when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.errors import AntiphonError
from router.openai.errors import describe, error_response

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy holds events back

_log = logging.getLogger(__name__)


def sse(body: dict[str, Any]) -> bytes:  # opaque: JSON
    """One event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work``; when the client disconnects, cancel it, wait for its end and return None.

    The request body must have been read: the next message tells that the client is gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        await _cancel(task, gone)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A stream of ready-made events that ends with ``[DONE]`` or with an error event.

    Nothing is sent before the first event is there: a request that fails at once gets its HTTP
    status and not a 200. Each item of ``events`` is one write.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self._events = events
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:  # a cancelled write must stop it, too
            try:
                first = await anext(events)
            except AntiphonError as error:
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _write(send, first)
            await _write_rest(send, events)


async def _write_rest(send: Send, events: AsyncIterator[bytes]) -> None:
    try:
        async for event in events:
            await _write(send, event)
    except AntiphonError as error:
        await _write(send, _error_event(error), last=True)
    except Exception as error:
        await _write(send, _error_event(error), last=True)
        raise
    else:
        await _write(send, DONE, last=True)


def _write(send: Send, data: bytes, *, last: bool = False) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": data, "more_body": not last})


def _error_event(error: Exception) -> bytes:
    _log.warning("a stream ended with an error: %s", error)
    return sse(describe(error)[1])
