"""An OpenAI endpoint on loopback that plays a script: streams, refusals, broken connections."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Body = dict[str, Any]
MODELS = {"object": "list", "data": [{"id": "fake-model", "object": "model"}]}


class Answer(NamedTuple):
    """An HTTP answer; ``cut``: the connection breaks before its end; ``stall``: it never ends."""

    events: tuple[Any, ...] = ()
    status: int = 200
    cut: bool = False
    stall: bool = False


def says(*pieces: str, finish: str | None = "length", usage: Body | None = None) -> Answer:
    """A stream of text pieces, then a finish reason, usage and ``[DONE]``."""
    events: list[Any] = [{"choices": [{"index": 0, "text": piece}]} for piece in pieces]
    if finish:
        events.append({"choices": [{"index": 0, "text": "", "finish_reason": finish}]})
    if usage is not None:
        events.append({"choices": [], "usage": usage})
    return Answer((*events, "[DONE]"))


def usage(prompt: int, completion: int, cached: int | None = None) -> Body:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


def refuses(status: int, message: str) -> Answer:
    return Answer(({"error": {"message": message}},), status=status)


def sse(event: Any) -> bytes:
    data = event if isinstance(event, str) else json.dumps(event)
    return f"data: {data}\n\n".encode()


class FakeOpenAI:
    """Answers each POST with ``script(body)`` and keeps the bodies and paths."""

    def __init__(self, script: Callable[[Body], Answer]) -> None:
        self.script = script
        self.bodies: list[Body] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        method, path, _ = first.split()
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in rest)}
        if method == "GET":
            data = json.dumps(MODELS).encode()
            writer.write(_head(200, f"content-length: {len(data)}") + data)
            return True
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.bodies.append(body)
        self.paths.append(path)
        self.headers.append(headers)
        answer = self.script(body)
        if answer.status != 200:
            data = json.dumps(answer.events[0]).encode()
            writer.write(_head(answer.status, f"content-length: {len(data)}") + data)
            return True
        writer.write(_head(200, "content-type: text/event-stream\r\ntransfer-encoding: chunked"))
        for event in map(sse, answer.events):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        if answer.stall:
            await reader.read()  # until the client leaves
            return False
        if not answer.cut:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not answer.cut


def _head(status: int, fields: str) -> bytes:
    return f"HTTP/1.1 {status} Word\r\n{fields}\r\n\r\n".encode()


@contextmanager
def serving(script: Callable[[Body], Answer]) -> Iterator[FakeOpenAI]:
    """The endpoint in a thread of its own, so that a command can run beside it."""
    fake = FakeOpenAI(script)
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready = threading.Event()

    async def main() -> None:
        handlers: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            handlers.add(task)
            await fake.handle(reader, writer)

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        await asyncio.wait_for(asyncio.gather(*handlers), timeout=10)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(15)
        loop.close()
