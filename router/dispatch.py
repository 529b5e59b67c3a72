"""Token ids in, token chunks out: choose a route, open its legs, carry the stream on when one dies.

A stream that loses a rank goes on elsewhere, from the prompt and the tokens already emitted,
without a gap or a repeat. It always ends with a reason.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence, Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from core import metrics
from core.clock import Clock, RealClock
from core.errors import AntiphonError, RankLost, Unavailable
from core.metrics import MetricSink, NullSink
from core.tracing.tracer import Tracer
from core.wire import (
    ErrorKind,
    FinishReason,
    Incarnation,
    Int32Array,
    RankId,
    Role,
    Route,
    SamplingParams,
    TokenChunk,
    TokenRequest,
    pack_ids,
)
from router.legs import Arrived, Legs
from router.live import LiveStreams
from router.merge import OutputMerge
from router.policy.base import Policy
from router.replicas import Replica
from router.reservation import Reservation
from router.tracing import AttemptTrace, attempt

log = logging.getLogger(__name__)

# max_new_tokens is a limit, not a forecast: most answers end earlier
EXPECTED_OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """How long and how often a stream looks for another route."""

    reroute_wait_s: float = 15.0
    max_reroutes: int = 3


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is the same for every attempt."""

    params: SamplingParams
    cache_salt: str
    priority: int


@dataclass(slots=True)
class _Search:
    """What a stream has learned from its attempts."""

    reroutes: int = 0
    avoid: set[RankId] = field(default_factory=set)
    reason: str = "no worker can take the request"

    def failed(self, reason: str, avoid: RankId) -> None:
        self.reason = reason
        self.avoid.add(avoid)


class Routes(Protocol):
    """Where a request may go: router.replicas.Replicas, or a part of it."""

    @property
    def any_member(self) -> bool: ...

    def routable(self, role: Role, avoid: AbstractSet[RankId]) -> list[Replica]: ...

    def change(self) -> asyncio.Event: ...

    def when_gone(self, tell: Callable[[Incarnation], None]) -> None: ...


class Dispatcher:
    """Implements core.ports.TokenStreams."""

    def __init__(
        self,
        replicas: Routes,
        prefill_policy: Policy,
        decode_policy: Policy,
        *,
        limits: DispatchLimits = DispatchLimits(),
        sink: MetricSink | None = None,
        clock: Clock | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._replicas = replicas
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._limits = limits
        self._sink: MetricSink = sink or NullSink()
        self._tracer = tracer
        self.live = LiveStreams(clock or RealClock())
        for policy in (prefill_policy, decode_policy):
            replicas.when_gone(policy.forget)

    async def stream(
        self,
        rid: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str = "",
        priority: int = 0,
        trace: str = "",
    ) -> AsyncGenerator[TokenChunk, None]:
        """See core.ports.TokenStreams. Close it (``aclosing``) when leaving early."""
        asked = _Asked(params, cache_salt, priority)
        merge = OutputMerge(rid, np.asarray(token_ids, dtype="<i4"))
        search = _Search()
        with self.live.track(rid, merge) as live:
            while not merge.finished:
                name = f"{rid}.{search.reroutes}"
                with attempt(self._tracer, trace, name) as spans:
                    held = await self._reservation(merge, asked, search)
                    if held is None:
                        yield _noted(spans, merge.fail(ErrorKind.UNAVAILABLE, search.reason))
                        return
                    try:
                        request = self._request(name, merge, asked, held, spans)
                        live.attempt(request)
                        async with aclosing(self._attempt(held, request, merge, search)) as chunks:
                            async for chunk in chunks:
                                if chunk.token_ids:
                                    held.first_token(chunk.usage, local=merge.local)
                                yield _noted(spans, chunk)
                    finally:
                        live.request = None
                        held.release(merge.token_ids())
                    if end := self._after_attempt(rid, merge, params, search):
                        yield _noted(spans, end)
                    elif spans is not None and not merge.finished:
                        spans.lost(search.reason)

    # --- choosing ------------------------------------------------------------

    async def _reservation(
        self, merge: OutputMerge, asked: _Asked, search: _Search
    ) -> Reservation | None:
        """Reserve a route, waiting for one if ranks are on their way.

        Returns None where a stream that has begun finds no other; raises Unavailable where it
        has not.
        """
        first = search.reroutes == 0
        if first and not self._replicas.any_member:
            raise Unavailable("no worker is known to this router")
        try:
            async with asyncio.timeout(self._limits.reroute_wait_s):
                while True:
                    change = self._replicas.change()
                    if held := self._reserve(merge, asked, search.avoid):
                        return held
                    await change.wait()
        except TimeoutError:
            wait_s = self._limits.reroute_wait_s
            if first:
                raise Unavailable(f"no complete route within {wait_s:g} s") from None
            search.reason = f"{search.reason}; no other route within {wait_s:g} s"
            return None

    def _reserve(self, merge: OutputMerge, asked: _Asked, avoid: set[RankId]) -> Reservation | None:
        """Choose and book in one go: nothing is awaited, so no other request comes between."""
        token_ids, salt = merge.token_ids(), asked.cache_salt
        remaining = max(asked.params.max_new_tokens - merge.produced, 0)
        output = min(remaining, EXPECTED_OUTPUT_TOKENS)
        decode = None
        if both := self._replicas.routable(Role.UNIFIED, avoid):
            prefill = self._prefill_policy.assign(both, token_ids, salt)
        else:
            first = self._replicas.routable(Role.PREFILL, avoid)
            second = self._replicas.routable(Role.DECODE, avoid)
            if not first or not second:
                return None
            prefill = self._prefill_policy.assign(first, token_ids, salt)
            decode = self._decode_policy.assign(second, token_ids, salt)
        return Reservation(prefill, decode, prompt_tokens=len(token_ids), output_tokens=output)

    def _request(
        self,
        rid: str,
        merge: OutputMerge,
        asked: _Asked,
        held: Reservation,
        spans: AttemptTrace | None,
    ) -> TokenRequest:
        """Each attempt has an id of its own: a rank may still be dropping the one before."""
        token_ids: Int32Array = merge.token_ids()
        route = Route(
            room=secrets.randbits(63),
            prefill=held.prefill.client.incarnation,
            decode=held.decode.client.incarnation,
        )
        request = TokenRequest(
            rid=rid,
            token_ids=pack_ids(token_ids),
            prompt_len=len(token_ids) - merge.produced,
            params=asked.params,
            route=route,
            cache_salt=asked.cache_salt,
            priority=asked.priority,
            trace="" if spans is None else spans.traceparent,
        )
        if spans is not None:
            spans.routed(held, request)
        return request

    # --- running ------------------------------------------------------------

    async def _attempt(
        self, held: Reservation, request: TokenRequest, merge: OutputMerge, search: _Search
    ) -> AsyncGenerator[TokenChunk, None]:
        """Emit until the output is finished, or until a rank is lost; ``search`` knows which."""
        async with Legs(held.legs, request) as legs:
            while legs.running:
                event = await legs.next()
                if merge.local and event.leg is not held.decode:
                    continue  # nobody waits for a prefill leg that was not needed
                if isinstance(event, Arrived):
                    if _peer_failed(event.chunk):
                        search.failed(_reason(event.chunk), _other(held, event.leg).rank)
                        return
                    for chunk in merge.accept(event.leg.role, event.chunk):
                        yield chunk
                    if merge.finished:
                        return
                elif isinstance(event.error, RankLost):
                    search.failed(str(event.error), event.leg.rank)
                    return
                elif isinstance(event.error, AntiphonError):
                    yield merge.fail(ErrorKind.INTERNAL, str(event.error))
                    return
                elif event.error is not None:
                    raise event.error
            yield merge.fail(
                ErrorKind.INTERNAL, f"both legs ended and output {merge.produced} never came"
            )

    def _after_attempt(
        self, rid: str, merge: OutputMerge, params: SamplingParams, search: _Search
    ) -> TokenChunk | None:
        """Prepare another attempt where one is needed; the chunk that ends the stream if none is
        allowed.
        """
        if merge.finished:
            return None
        if merge.produced >= params.max_new_tokens:
            return merge.stop(FinishReason.LENGTH)
        if search.reroutes >= self._limits.max_reroutes:
            tried = f"gave up after {search.reroutes} reroutes: " if search.reroutes else ""
            return merge.fail(ErrorKind.UNAVAILABLE, tried + search.reason)
        log.warning(
            "routing again after %d tokens: %s", merge.produced, search.reason, extra={"rid": rid}
        )
        search.reroutes += 1
        merge.restart()
        self._sink.count(metrics.REROUTES)
        return None


def _noted(spans: AttemptTrace | None, chunk: TokenChunk) -> TokenChunk:
    """The chunk, once the spans know of it."""
    if spans is not None:
        spans.chunk(chunk)
    return chunk


def _peer_failed(chunk: TokenChunk) -> bool:
    """A leg that lost its peer may say so before the router notices the loss itself."""
    return (
        chunk.finish is FinishReason.ERROR
        and chunk.error is not None
        and chunk.error.kind is ErrorKind.UNAVAILABLE
    )


def _reason(chunk: TokenChunk) -> str:
    return chunk.error.message if chunk.error is not None else "a leg failed"


def _other(held: Reservation, leg: Replica) -> Replica:
    return held.decode if leg is held.prefill else held.prefill
