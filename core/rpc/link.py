"""One end of a bidirectional gRPC stream: a reader with a silence limit, a writer with a pulse.

Sessions and peer links, clients and servers all run ``converse``; they differ in what they send
when idle and in what a frame means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
import msgspec

from core.rpc.service import STOPPING

HEARTBEAT = b""  # an empty frame; messages are never empty


class Duplex(Protocol):
    """What a grpc.aio call and a servicer context have in common."""

    async def read(self) -> Any:  # opaque: bytes, or grpc.aio.EOF
        ...

    async def write(self, message: bytes, /) -> None: ...


class Context(Duplex, Protocol):
    """One RPC as the server's handlers see it (grpc.aio.ServicerContext).

    A handler sends its metadata before it converses: gRPC would send it with the first write, and
    once that write is cancelled it cannot end the RPC, and the caller waits for ever.
    """

    async def send_initial_metadata(self, metadata: tuple[()], /) -> None: ...

    async def abort(self, code: Any, details: str) -> NoReturn:  # opaque: grpc.StatusCode
        ...


@dataclass(frozen=True, slots=True)
class Pulse:
    """When to speak and when to give up. Seconds.

    ``heartbeat`` is sent after ``every_s`` without another frame.
    """

    every_s: float
    silence_s: float
    heartbeat: bytes


class Outbox:
    """Frames waiting to be written, bounded in bytes. Loop thread only; never blocks."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pending_bytes = 0
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._closing: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def send(self, frame: bytes) -> None:
        """Queue a frame. A reader that is too far behind ends the conversation instead."""
        if self._closing.done():
            return
        if self._pending_bytes + len(frame) > self._limit_bytes:
            self.close(f"reads too slowly: {self._pending_bytes} bytes are waiting")
            return
        self._pending_bytes += len(frame)
        self._queue.put_nowait(frame)

    def close(self, reason: str) -> None:
        """End the conversation; the first reason stands."""
        if not self._closing.done():
            self._closing.set_result(reason)

    async def next(self) -> bytes:
        return await self._queue.get()

    def written(self, frame: bytes) -> None:
        self._pending_bytes -= len(frame)

    async def closed(self) -> str:
        return await asyncio.shield(self._closing)


async def converse(
    stream: Duplex, outbox: Outbox, on_frame: Callable[[bytes], None], pulse: Pulse
) -> str:
    """Read and write until one side ends, is silent for too long or the outbox is closed.

    Returns the reason, in words. ``on_frame`` may raise msgspec.MsgspecError for a bad frame.
    """
    tasks = [
        asyncio.ensure_future(outbox.closed()),
        asyncio.ensure_future(_read(stream, on_frame, pulse.silence_s)),
        asyncio.ensure_future(_write(stream, outbox, pulse)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(stream: Duplex, on_frame: Callable[[bytes], None], silence_s: float) -> str:
    try:
        while True:
            async with asyncio.timeout(silence_s):
                frame = await stream.read()
            if frame is grpc.aio.EOF:
                return "the other side ended the stream"
            if frame != HEARTBEAT:
                on_frame(frame)
    except TimeoutError:
        return f"silent for {silence_s:g} s"
    except msgspec.MsgspecError as error:
        return f"sent a malformed message: {error}"
    except (grpc.RpcError, grpc.aio.BaseError) as error:
        return explain(error)


async def _write(stream: Duplex, outbox: Outbox, pulse: Pulse) -> str:
    try:
        while True:
            try:
                async with asyncio.timeout(pulse.every_s):
                    frame = await outbox.next()
            except TimeoutError:
                await stream.write(pulse.heartbeat)
                continue
            await stream.write(frame)
            outbox.written(frame)
    except (grpc.RpcError, grpc.aio.BaseError) as error:
        return explain(error)
    except asyncio.InvalidStateError:  # the call ended between two writes
        return "the stream was closed"


def in_order(reason: str) -> bool:
    """Whether a conversation ended because its rank stops, as it was told to."""
    return reason.endswith(STOPPING)


def explain(error: BaseException) -> str:
    """A gRPC failure in one line: its status and details where it has them."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
