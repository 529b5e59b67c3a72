"""The one or two legs of an attempt, open at the same time, as one sequence of events."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from core.errors import RankLost
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
        self._replicas = replicas
        self._request = request
        self._events: asyncio.Queue[Arrived | Ended] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._open = len(replicas)
        self._handed_over: list[Replica] = []  # legs that ended and left the rest to the other
        self._finished = False
        self._failed = False
        self._local = False  # the decode leg needs no KV

    @property
    def running(self) -> bool:
        """Is there another event to come?"""
        return self._open > 0

    async def next(self) -> Arrived | Ended:
        event = await self._events.get()
        self._open -= isinstance(event, Ended)
        return event

    async def __aenter__(self) -> Self:
        for replica in self._replicas:
            task = asyncio.create_task(self._pump(replica))
            task.add_done_callback(partial(self._ended, replica))
            self._tasks.append(task)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        enough = kind is GeneratorExit and not self._failed  # such as a stop string
        for leg, task in zip(self._replicas, self._tasks, strict=True):
            if enough and not task.done():
                leg.client.abort(self._request.rid, done=True)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._finished or self._local:
            for leg in self._handed_over:
                leg.client.abort(self._request.rid, done=enough)

    async def _pump(self, leg: Replica) -> None:
        finish, last = None, False
        async with aclosing(leg.client.stream(self._request)) as chunks:
            async for chunk in chunks:
                finish = chunk.finish
                self._local |= leg.role is Role.DECODE and _is_first(self._request, chunk)
                last = chunk.last or finish is not None
                self._finished |= finish not in {None, FinishReason.ERROR}
                self._failed |= finish is FinishReason.ERROR
                self._events.put_nowait(Arrived(leg, chunk))
        if not last:
            raise RankLost(f"{leg.client.incarnation} ended the stream without a reason")
        if finish is None:
            self._handed_over.append(leg)

    def _ended(self, leg: Replica, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            self._failed |= error is not None
            self._events.put_nowait(Ended(leg, error))


def _is_first(request: TokenRequest, chunk: TokenChunk) -> bool:
    """Whether the chunk has the token that follows the request's last one."""
    start = len(request.token_ids) // 4 - request.prompt_len
    return bool(chunk.token_ids) and chunk.offset == start
