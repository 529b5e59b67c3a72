"""The Protocols that cross folders."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from core.handoffs import HandoffReport
from core.wire import (
    Incarnation,
    LoadReport,
    RankInfo,
    RankStatus,
    SamplingParams,
    TokenChunk,
    TokenRequest,
)


class WorkerClient(Protocol):
    """A router's session with one incarnation of one rank."""

    incarnation: Incarnation

    @property
    def info(self) -> RankInfo: ...

    @property
    def load(self) -> LoadReport:
        """The latest report."""
        ...

    @property
    def transfers(self) -> HandoffReport | None:
        """The latest counters of its handoffs; None where there are none."""
        ...

    @property
    def alive(self) -> bool: ...

    @property
    def lost(self) -> str:
        """Why the session ended; empty while it lives."""
        ...

    def stream(self, request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        """Submit and yield this leg's chunks up to the one with ``finish`` or ``last``.

        Raises RankLost when the session ends first. Leaving early aborts the request.
        """
        ...

    def abort(self, rid: str, *, done: bool = False) -> None:
        """Stop a request; its stream, if open, brings no more and is to be left.

        ``done`` where nothing went wrong: all that was wanted of it is there.
        """
        ...

    async def status(self) -> RankStatus: ...

    async def close(self) -> None: ...


class TokenStreams(Protocol):
    """Token ids in, token chunks out: what the front door needs of a dispatcher."""

    def stream(
        self,
        rid: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str = "",
        priority: int = 0,
        trace: str = "",
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield chunks with strictly rising offsets, none twice; the last one has ``finish``.

        The first chunk has the usage, merged over the legs. Failures of workers end the stream with
        ``finish=ERROR`` and an error, never with silence. Raises Unavailable when no complete
        pair of workers is there. Leaving early (aclose, cancellation) aborts every leg.

        Cached KV is shared only by requests of one ``cache_salt``. A higher ``priority`` goes
        first. ``trace`` is the traceparent of the caller's span; without one nothing is traced.
        """
        ...
