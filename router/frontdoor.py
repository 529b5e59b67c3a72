"""FrontDoor: a text request in, text events out. HTTP and gRPC both call it.

The way of a request: a place (admission), token ids (template, tokenizer), one token stream for
each choice, and back to text (choice.py). Every stream is closed when the caller leaves.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from core import metrics
from core.clock import Clock
from core.errors import AntiphonError, RequestError
from core.metrics import MetricSink
from core.ports import TokenStreams
from core.tracing.tracer import Tracer
from core.wire import SamplingParams
from router.admission import Admission
from router.choice import Choice
from router.echo import clipped
from router.encoder import Encoder
from router.failures import detail_of, told
from router.meter import RequestMeter, status_of
from router.prompt import PromptReader
from router.rules import check
from router.text.request import DEFAULT_TERMS, ChatPrompt, Terms, TextRequest, TextUsage
from router.textstream import LEAD_PROMPT_TOKENS, ChoiceStream, TextStream
from router.tracing import RequestTrace, tokenising

log = logging.getLogger(__name__)

_SEED_BITS = 63
_GRAVE = frozenset({"unavailable", "error"})  # ends of a request that an operator should see


def draw_seed() -> int:
    """A seed nobody can guess."""
    return secrets.randbits(_SEED_BITS)


class FrontDoor:
    """The one way in, for every protocol."""

    def __init__(
        self,
        streams: TokenStreams,
        encoder: Encoder,
        *,
        admission: Admission,
        sink: MetricSink,
        clock: Clock,
        terms: Terms = DEFAULT_TERMS,
        draw_seed: Callable[[], int] = draw_seed,
        tracer: Tracer | None = None,
    ) -> None:
        self.model = encoder.model
        self.clock = clock
        self.tokenizer = encoder.tokenizer
        self.admission = admission
        self._streams = streams
        self._encoder = encoder
        self._terms = terms
        self._sink = sink
        self._draw_seed = draw_seed
        self._tracer = tracer
        self._aborts: dict[str, Callable[[], None]] = {}  # request id -> how to stop it

    @asynccontextmanager
    async def open(self, request: TextRequest) -> AsyncIterator[TextStream]:
        """Admit a request and give its stream; leaving the block early aborts it.

        Raises RequestError, Overloaded, Unavailable and EngineError, for the stream's iteration,
        too. What they say is for the caller; the log has the rest, with the request's id.
        """
        meter = RequestMeter(self._sink, self.clock)
        usage = TextUsage()
        status, problem = "aborted", ""  # what any exception means that is not named below
        early = asyncio.Event()  # aborted before its stream was there
        assert request.rid not in self._aborts, request.rid
        self._aborts[request.rid] = early.set
        self._sink.set(metrics.RUNNING, self.running)
        trace = None if self._tracer is None else self._trace(self._tracer, request)
        try:
            check(request, self.model, self._terms)
            with self.admission.ticket(len(request.prompts) * request.n):
                with tokenising(self._tracer, trace):
                    prompts = [await self._encoder.prompt_ids(p) for p in request.prompts]
                stream = self._start(request, prompts, meter, usage, trace)
                self._aborts[request.rid] = stream.abort
                if early.is_set():
                    stream.abort()
                try:
                    yield stream
                finally:
                    await stream.aclose()
                status = "aborted" if stream.aborted else "ok"
        except Exception as error:
            status, problem = _noted(error, request.rid)
            raise told(error, request.rid) from error
        finally:
            del self._aborts[request.rid]
            self._sink.set(metrics.RUNNING, self.running)
            meter.end(status, usage)
            _log_end(request.rid, status, problem, usage, meter.age_s)
            if trace is not None:
                trace.end(status, problem, usage)

    @property
    def running(self) -> int:
        """Requests that are open."""
        return len(self._aborts)

    def abort(self, rid: str) -> bool:
        """End the request with exactly this id; False when none is open.

        Its stream ends like one that ran out of time: what is known, then ABORT for every choice.
        """
        stop = self._aborts.get(rid)
        if stop is not None:
            stop()
        return stop is not None

    def abort_all(self) -> None:
        """End every open request with what is known: the server is going."""
        for stop in list(self._aborts.values()):
            stop()

    async def encode(self, prompt: str | ChatPrompt, *, add_special: bool = True) -> list[int]:
        """Token ids of a text or of a rendered conversation; raises RequestError.

        ``add_special`` is for texts: a chat template writes the special tokens itself.
        """
        return await self._encoder.encode(prompt, add_special=add_special)

    def _start(
        self,
        request: TextRequest,
        prompts: list[list[int]],
        meter: RequestMeter,
        usage: TextUsage,
        trace: RequestTrace | None,
    ) -> TextStream:
        seed = self._draw_seed() if request.seed is None else request.seed
        budgets = [self._budget(request, p, len(ids)) for p, ids in enumerate(prompts)]
        usage.prompt_tokens = sum(map(len, prompts))
        meter.started(usage.prompt_tokens)
        salt = request.cache_salt
        if self._terms.salt_by_key:
            salt = f"{request.caller}:{salt}"
        parent = "" if trace is None else trace.traceparent
        choices = []
        for p, ids in enumerate(prompts):
            reader = self._reader(request, p, ids)
            lead = asyncio.Event()
            if len(ids) < LEAD_PROMPT_TOKENS and request.sampling.prompt_logprobs is None:
                lead.set()
            for i in range(request.n):
                params = self._params(request, budgets[p], seed + i, scores=i == 0)
                choice = self._choice(request, p * request.n + i, ids, reader)
                rid = _rid(request, choice.index)
                tokens = partial(
                    self._streams.stream, rid, ids, params, salt, request.priority, parent
                )
                choices.append(ChoiceStream(choice, tokens, leads=i == 0, lead=lead))
        stream = TextStream(choices, meter, usage, timeout_s=self._timeout(request))
        if trace is not None:
            trace.stream = stream
        return stream

    def _trace(self, tracer: Tracer, request: TextRequest) -> RequestTrace | None:
        rids = [_rid(request, i) for i in range(len(request.prompts) * request.n)]
        return RequestTrace.begin(tracer, request, self.model.name, {request.rid, *rids})

    def _timeout(self, request: TextRequest) -> float | None:
        """Seconds from arrival: the shorter of the caller's and the operator's."""
        limits = (request.timeout_s, self._terms.request_timeout_s or None)
        return min((limit for limit in limits if limit is not None), default=None)

    def _params(
        self, request: TextRequest, budget: int, seed: int, *, scores: bool
    ) -> SamplingParams:
        """``scores``: this choice has the prompt scored, for all choices of the prompt."""
        asked = request.sampling
        return msgspec.structs.replace(
            asked,
            max_new_tokens=budget,
            seed=seed % (1 << _SEED_BITS),
            top_k=min(asked.top_k, self.model.vocab_size),
            prompt_logprobs=asked.prompt_logprobs if scores else None,
        )

    def _reader(self, request: TextRequest, position: int, ids: list[int]) -> PromptReader | None:
        """Whoever asks for the prompt gets it back."""
        if not request.echo and request.sampling.prompt_logprobs is None:
            return None
        return PromptReader(request, self.tokenizer, request.prompts[position], ids)

    def _choice(
        self, request: TextRequest, index: int, ids: list[int], prompt: PromptReader | None
    ) -> Choice:
        return Choice(
            request,
            self.tokenizer,
            index=index,
            silent_ids=self.model.eos_token_ids.union(request.sampling.stop_token_ids),
            continues=not self.tokenizer.is_special(ids[-1]),
            prompt=prompt,
        )

    def _budget(self, request: TextRequest, position: int, prompt_tokens: int) -> int:
        """Output tokens the request may have; raises RequestError when it can never fit."""
        context = self.model.context_len
        asked = request.max_new_tokens
        prompt = request.prompts[position]
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        if prompt_tokens + (asked or 1) <= context:
            limit = asked
            if limit is None:
                limit = min(context - prompt_tokens, self._terms.max_output_tokens or context)
            _check_least(request.sampling.min_new_tokens, limit)
            return max(limit, 1)  # with 0 the prompt is only scored: that takes a step, too
        wish = "at least one token" if asked is None else f"{clipped(asked)} tokens"
        raise RequestError(
            f"This model's maximum context length is {context} tokens. However, you asked for "
            f"{wish} of output after a prompt of {prompt_tokens} tokens. "
            "Shorten the prompt or ask for fewer output tokens.",
            param=param,
            code="context_length_exceeded",
        )


def _noted(error: Exception, rid: str) -> tuple[str, str]:
    """How a request ended that failed: the label of the metric, and what the log says."""
    if not isinstance(error, AntiphonError):
        log.error("a defect ended the request", exc_info=error, extra={"rid": rid})
        return "error", repr(error)
    status, detail = status_of(error), detail_of(error)
    if error.detail and status not in _GRAVE:  # a rank's words, which its caller does not see
        log.warning("refused by a rank: %s", detail, extra={"rid": rid})
    return status, detail


def _log_end(rid: str, status: str, problem: str, usage: TextUsage, age_s: float) -> None:
    log.log(
        logging.WARNING if status in _GRAVE else logging.INFO,
        "ended: %s after %.3f s, %d tokens of prompt, %d cached, %d of output%s",
        status,
        age_s,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        f": {problem}" if problem else "",
        extra={"rid": rid},
    )


def _rid(request: TextRequest, index: int) -> str:
    return f"{request.rid}-{index}" if len(request.prompts) * request.n > 1 else request.rid


def _check_least(least: int, limit: int) -> None:
    """``min_tokens`` against what the output can have; raises RequestError."""
    if least > limit:
        raise RequestError(
            f"min_tokens is {clipped(least)}, but the output can have at most {limit} tokens",
            param="min_tokens",
        )
