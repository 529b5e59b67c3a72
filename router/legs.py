"""The one or two legs of an attempt, open at the same time, as one sequence of events.

Two legs have a task each, which puts what comes into a queue. A leg that is alone is read by
whoever waits for its events: a task and a queue would double what a token costs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from core.errors import AntiphonError, RankLost
from core.wire import FinishReason, Role, TokenChunk, TokenRequest
from router.replicas import Replica


@dataclass(frozen=True, slots=True)
class Arrived:
    """A leg brought a chunk."""

    leg: Replica
    chunk: TokenChunk


@dataclass(frozen=True, slots=True)
class Ended:
    """A leg brings no more: ``error`` is None where it ended as it should."""

    leg: Replica
    error: BaseException | None


class Legs:
    """Submits one request to each replica of an attempt; leaving the context aborts what runs.

    A prefill leg that has said all holds its KV until the other leg takes it: where that leg has
    not come to a good end, or has computed the prompt itself, it is aborted too.
    """

    def __init__(self, replicas: tuple[Replica, ...], request: TokenRequest) -> None:
        self._request = request
        self._streams = [(leg, leg.client.stream(request)) for leg in replicas]
        self._tasks: list[asyncio.Task[None]] = []
        self._events: asyncio.Queue[Arrived | Ended] = asyncio.Queue()  # of the tasks
        self._open = len(replicas)
        self._said_all: list[Replica] = []
        self._handed_over: list[Replica] = []  # legs of those that left the rest to the other
        self._finished = False
        self._failed = False
        self._local = False  # the decode leg needs no KV

    @property
    def running(self) -> bool:
        """Is there another event to come?"""
        return self._open > 0

    async def next(self) -> Arrived | Ended:
        event = await (self._events.get() if self._tasks else self._read(*self._streams[0]))
        self._open -= isinstance(event, Ended)
        return event

    async def __aenter__(self) -> Self:
        if len(self._streams) > 1:
            for leg, chunks in self._streams:
                task = asyncio.create_task(self._pump(leg, chunks))
                task.add_done_callback(partial(self._pumped, leg))
                self._tasks.append(task)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        enough = kind is GeneratorExit and not self._failed  # such as a stop string
        for leg, _ in self._streams:
            if enough and leg not in self._said_all:
                leg.client.abort(self._request.rid, done=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, chunks in self._streams:
            await chunks.aclose()
        if not self._finished or self._local:
            for leg in self._handed_over:
                leg.client.abort(self._request.rid, done=enough)

    async def _read(
        self, leg: Replica, chunks: AsyncGenerator[TokenChunk, None]
    ) -> Arrived | Ended:
        """The next event of one leg; raises what nobody foresaw."""
        error: AntiphonError | None = None
        try:
            return self._arrived(leg, await anext(chunks))
        except StopAsyncIteration:
            if leg not in self._said_all:
                name = leg.client.incarnation
                error = RankLost(f"{name} ended the stream without a reason")
        except AntiphonError as raised:
            error = raised
        self._failed |= error is not None
        return Ended(leg, error)

    def _arrived(self, leg: Replica, chunk: TokenChunk) -> Arrived:
        finish = chunk.finish
        self._local |= leg.role is Role.DECODE and _is_first(self._request, chunk)
        self._finished |= finish not in {None, FinishReason.ERROR}
        self._failed |= finish is FinishReason.ERROR
        if chunk.last or finish is not None:
            self._said_all.append(leg)
            if finish is None:
                self._handed_over.append(leg)
        return Arrived(leg, chunk)

    async def _pump(self, leg: Replica, chunks: AsyncGenerator[TokenChunk, None]) -> None:
        event: Arrived | Ended | None = None
        while not isinstance(event, Ended):
            event = await self._read(leg, chunks)
            self._events.put_nowait(event)

    def _pumped(self, leg: Replica, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._failed = True
            self._events.put_nowait(Ended(leg, error))


def _is_first(request: TokenRequest, chunk: TokenChunk) -> bool:
    """Whether the chunk has the token that follows the request's last one."""
    start = len(request.token_ids) // 4 - request.prompt_len
    return bool(chunk.token_ids) and chunk.offset == start
