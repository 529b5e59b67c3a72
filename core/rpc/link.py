"""One end of a bidirectional gRPC stream: a reader, a writer, and a pulse that both share.

Sessions and peer links, clients and servers all run ``converse``; they differ in their pace and in
what a message means. Heartbeats (core/rpc/beats.py) go ahead of messages that wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
import msgspec

from core.rpc.beats import MARK, Beats
from core.rpc.service import STOPPING

log = logging.getLogger(__name__)

TOLD_S = 1.0  # after a write has failed: until the reader says why, or never will


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

    A heartbeat is sent every ``every_s``, and ``on_beat`` is called with each. The end is given up
    when none was answered that was sent in the last ``silence_s``.
    """

    every_s: float
    silence_s: float
    on_beat: Callable[[], None] = lambda: None


class Outbox:
    """Frames waiting to be written, bounded in bytes. Loop thread only; never blocks."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pending_bytes = 0
        self._queue: deque[bytes] = deque()
        self._beat = False
        self._filled = asyncio.Event()
        self._closing: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def send(self, frame: bytes) -> None:
        """Queue a frame. A reader that is too far behind ends the conversation instead."""
        if self._closing.done():
            return
        if self._pending_bytes + len(frame) > self._limit_bytes:
            self.close(f"reads too slowly: {self._pending_bytes} bytes are waiting")
            return
        self._pending_bytes += len(frame)
        self._queue.append(frame)
        self._filled.set()

    def beat(self) -> None:
        """Ask for a heartbeat, ahead of the frames that wait."""
        self._beat = True
        self._filled.set()

    def close(self, reason: str) -> None:
        """End the conversation; the first reason stands."""
        if not self._closing.done():
            self._closing.set_result(reason)

    async def next(self) -> bytes | None:
        """The next frame to write; None for a heartbeat."""
        while not (self._beat or self._queue):
            self._filled.clear()
            await self._filled.wait()
        if self._beat:
            self._beat = False
            return None
        return self._queue.popleft()

    def written(self, frame: bytes) -> None:
        self._pending_bytes -= len(frame)

    async def closed(self) -> str:
        return await asyncio.shield(self._closing)


async def converse(
    stream: Duplex, outbox: Outbox, on_message: Callable[[bytes], None], pulse: Pulse
) -> str:
    """Read and write until one side ends, is silent for too long or the outbox is closed.

    Returns the reason, in words. What waits in the outbox first is written before any heartbeat.
    ``on_message`` may raise msgspec.MsgspecError for a bad one.
    """
    beats = Beats(asyncio.get_running_loop().time())
    tasks = [
        closed := asyncio.ensure_future(outbox.closed()),
        reading := asyncio.ensure_future(_read(stream, outbox, on_message, beats)),
        writing := asyncio.ensure_future(_write(stream, outbox, beats)),
        asyncio.ensure_future(_beat(outbox, beats, pulse)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if writing.done():  # it fails when the stream has ended; why, the reader is told
            ends = (closed, reading)
            await asyncio.wait(ends, timeout=TOLD_S, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def complain(task: asyncio.Task[None]) -> None:
    """The end of a task that nobody awaits: an exception is a defect, which must be seen."""
    if not task.cancelled() and (error := task.exception()):
        log.error("a defect ended a link", exc_info=error)


async def _read(
    stream: Duplex, outbox: Outbox, on_message: Callable[[bytes], None], beats: Beats
) -> str:
    try:
        while (frame := await stream.read()) is not grpc.aio.EOF:
            if not is_beat(frame):
                on_message(frame)
            elif beats.hear(frame):
                outbox.beat()
        return "the other side ended the stream"
    except msgspec.MsgspecError as error:
        return f"sent a malformed message: {error}"
    except (grpc.RpcError, grpc.aio.BaseError) as error:
        return explain(error)


async def _write(stream: Duplex, outbox: Outbox, beats: Beats) -> str:
    try:
        while True:
            frame = await outbox.next()
            await stream.write(beats.frame() if frame is None else frame)
            outbox.written(frame or b"")
    except (grpc.RpcError, grpc.aio.BaseError) as error:
        return explain(error)
    except asyncio.InvalidStateError:  # the call ended between two writes
        return "the stream was closed"


async def _beat(outbox: Outbox, beats: Beats, pulse: Pulse) -> str:
    """Beat until nothing of it was heard for too long."""
    loop = asyncio.get_running_loop()
    silence_s, rest_s = 0.0, pulse.every_s  # until the next beat
    while True:
        wait_s = min(rest_s, pulse.silence_s - silence_s)
        await asyncio.sleep(wait_s)
        silence_s = beats.silence_s(loop.time(), wait_s)
        if silence_s >= pulse.silence_s:
            return f"silent for {pulse.silence_s:g} s"
        rest_s -= wait_s
        if rest_s <= 0:
            beats.begin(loop.time())
            outbox.beat()
            pulse.on_beat()
            rest_s = pulse.every_s


def is_beat(frame: bytes) -> bool:
    """Whether it is a heartbeat and no message."""
    return frame[:1] == MARK


def in_order(reason: str) -> bool:
    """Whether a conversation ended because its rank stops, as it was told to."""
    return reason.endswith(STOPPING)


def explain(error: BaseException) -> str:
    """A gRPC failure in one line: its status and details where it has them."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
