"""An HTTP client that can hang up: one request over raw ASGI, without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class RawCall:
    """A POST whose answer is read piece by piece."""

    def __init__(self, app: ASGIApp, path: str, body: dict[str, Any]) -> None:
        self.status: int | None = None
        self.writes: asyncio.Queue[bytes] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._body = json.dumps(body).encode()
        self._sent = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def hang_up(self) -> None:
        self._gone.set()

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.writes.put_nowait(message["body"])
