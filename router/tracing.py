"""What the router says of a request in spans: the request, its prompt's tokens, each attempt.

    chat MODEL               the whole request; a child of the caller's span where it named one
    ├── tokenise             template and tokenizer
    └── attempt              one for each choice and route: the parent of what the ranks do
        └── dispatch         until a route was there, and which

Names of attributes follow OpenTelemetry's conventions for generative AI where those have one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from core.tracing.span import SpanKind, Value
from core.tracing.tracer import Span, Tracer
from core.wire import TokenChunk, TokenRequest
from router.reservation import Reservation
from router.text.request import ChatPrompt, TextRequest, TextUsage
from router.textstream import TextStream

LEFT = "the caller went away"
LATE = "the deadline passed"
STOPPED = "it was stopped from outside"
CANCELLED = "its caller went away, was out of time or stopped it"
ROUTES = "no route was found"


class RequestTrace:
    """The span of one request, and the one of its tokens."""

    def __init__(self, span: Span, request: TextRequest, model: str, rids: Iterable[str]) -> None:
        """``rids`` are those of the request and of its choices."""
        self._span = span
        self.traceparent = span.traceparent
        self.stream: TextStream | None = None  # set once it is there
        span.set(_asked(request, model))
        for rid in rids:
            span.claim(rid)

    @classmethod
    def begin(
        cls, tracer: Tracer, request: TextRequest, model: str, rids: Iterable[str]
    ) -> RequestTrace | None:
        """None where this request is not among those traced."""
        name = f"{_operation(request)} {model}"
        span = tracer.start(name, request.trace, kind=SpanKind.SERVER)
        return None if span is None else cls(span, request, model, rids)

    def end(self, status: str, problem: str, usage: TextUsage) -> None:
        """The request is over; ``status`` and ``problem`` as for the log."""
        finishes = [] if self.stream is None else self.stream.finishes
        self._span.set(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": tuple(f.value for f in finishes if f),
            }
        )
        if status == "ok":
            self._span.end()
            return
        self._span.set({"error.type": status})
        self._span.end(self._why() if status == "aborted" else problem or "an internal error")

    def _why(self) -> str:
        if self.stream is not None and self.stream.timed_out:
            return LATE
        return STOPPED if self.stream is not None and self.stream.cut else LEFT


class AttemptTrace:
    """The spans of one attempt to answer one choice."""

    def __init__(self, tracer: Tracer, span: Span, rid: str) -> None:
        span.set({"antiphon.rid": rid})
        self._span = span
        self._dispatch = tracer.start("dispatch", span.traceparent)
        self._tokens = 0
        self._error = ""
        self.traceparent = span.traceparent

    def routed(self, held: Reservation, request: TokenRequest) -> None:
        """A route was found and booked."""
        found: dict[str, Value] = {
            "antiphon.prefill.rank": str(held.prefill.rank),
            "antiphon.decode.rank": str(held.decode.rank),
            "antiphon.room": str(request.route.room),
            "antiphon.reused.output_tokens": len(request.token_ids) // 4 - request.prompt_len,
        }
        if held.expected_tokens is not None:
            found["antiphon.expected.cached_tokens"] = held.expected_tokens
        self._span.set(found)
        if self._dispatch is not None:
            self._dispatch.set(found)
            self._dispatch.end()

    def chunk(self, chunk: TokenChunk) -> None:
        """It goes on to the caller."""
        if chunk.token_ids and not self._tokens:
            self._span.event("first_token")
        self._tokens += len(chunk.token_ids)
        if chunk.finish is not None:
            self._span.set({"gen_ai.response.finish_reasons": (chunk.finish.value,)})
        if chunk.error is not None:
            self._error = chunk.error.message

    def lost(self, reason: str) -> None:
        """Another attempt carries on."""
        self._error = reason
        self._span.event("reroute", {"reason": reason, "output_tokens": self._tokens})

    def end(self, error: str = "") -> None:
        error = error or self._error
        if self._dispatch is not None:
            self._dispatch.end(error or ROUTES)  # no effect where a route was found
        self._span.set({"gen_ai.usage.output_tokens": self._tokens})
        self._span.end(error)


@contextmanager
def attempt(tracer: Tracer | None, trace: str, rid: str) -> Iterator[AttemptTrace | None]:
    """The trace of the attempt that the block is, under the span ``trace``; None where there is
    none. However the block is left, its spans end.
    """
    span = None if tracer is None or not trace else tracer.start("attempt", trace)
    if tracer is None or span is None:
        yield None
        return
    spans = AttemptTrace(tracer, span, rid)
    try:
        yield spans
    except GeneratorExit:  # the front door has what it wants, such as a stop string
        spans.end()
        raise
    except asyncio.CancelledError:
        spans.end(CANCELLED)
        raise
    except BaseException as error:
        spans.end(str(error) or type(error).__name__)
        raise
    spans.end()


@contextmanager
def tokenising(tracer: Tracer | None, trace: RequestTrace | None) -> Iterator[None]:
    """The block turns the prompts of a traced request into tokens."""
    span = None
    if tracer is not None and trace is not None:
        span = tracer.start("tokenise", trace.traceparent)
    if span is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        span.end(str(error) or type(error).__name__)
        raise
    span.end()


def _operation(request: TextRequest) -> str:
    return "chat" if isinstance(request.prompts[0], ChatPrompt) else "text_completion"


def _asked(request: TextRequest, model: str) -> dict[str, Value]:
    """What was asked for. No text and no token ids: a trace may be read by others than the log."""
    sampling = request.sampling
    asked: dict[str, Value] = {
        "gen_ai.operation.name": _operation(request),
        "gen_ai.provider.name": "antiphon",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.rid,
        "antiphon.rid": request.rid,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if request.client_id:
        asked["antiphon.client.request_id"] = request.client_id
    if request.max_new_tokens is not None:
        asked["gen_ai.request.max_tokens"] = request.max_new_tokens
    if request.seed is not None:
        asked["gen_ai.request.seed"] = request.seed
    if (choices := len(request.prompts) * request.n) > 1:
        asked["gen_ai.request.choice.count"] = choices
    return asked
