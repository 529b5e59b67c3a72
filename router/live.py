"""The token streams a router has open, and where each one is: for its log and ``antiphon dump``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from core.clock import Clock
from core.wire import TokenRequest
from router.merge import OutputMerge

log = logging.getLogger(__name__)


class StreamView(msgspec.Struct, frozen=True, kw_only=True):
    """One open stream. Lengths in tokens."""

    rid: str
    attempt: str  # the rid that the ranks know; empty: it looks for a route
    ranks: tuple[str, ...]  # of the attempt
    room: int
    produced: int  # emitted so far
    age_s: float


@dataclass(slots=True, eq=False)
class LiveStream:
    """Kept up to date by the dispatcher."""

    rid: str
    merge: OutputMerge
    arrived_s: float
    request: TokenRequest | None = None  # of the attempt that runs

    def attempt(self, request: TokenRequest) -> None:
        """An attempt begins: the record that joins its id, which ranks know, to the stream's."""
        self.request = request
        log.info(
            "prefill on %s, decode on %s, room %d, %d tokens of prompt, %d of output so far",
            request.route.prefill,
            request.route.decode,
            request.route.room,
            request.prompt_len,
            self.merge.produced,
            extra={"rid": self.rid, "attempt": request.rid},
        )

    def view(self, now: float) -> StreamView:
        request = self.request
        lives = () if request is None else (request.route.prefill, request.route.decode)
        return StreamView(
            rid=self.rid,
            attempt="" if request is None else request.rid,
            ranks=tuple(dict.fromkeys(str(life.rank) for life in lives)),
            room=0 if request is None else request.route.room,
            produced=self.merge.produced,
            age_s=now - self.arrived_s,
        )


@dataclass(slots=True)
class LiveStreams:
    """Every open stream of one dispatcher, in the order of arrival."""

    clock: Clock
    _streams: dict[LiveStream, None] = field(default_factory=dict)

    @contextmanager
    def track(self, rid: str, merge: OutputMerge) -> Iterator[LiveStream]:
        """List the stream while the block runs."""
        stream = LiveStream(rid, merge, self.clock.now())
        self._streams[stream] = None
        try:
            yield stream
        finally:
            del self._streams[stream]

    def views(self) -> list[StreamView]:
        now = self.clock.now()
        return [stream.view(now) for stream in self._streams]
