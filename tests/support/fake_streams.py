"""Token streams that play a script, and remember who asked and who left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from core.errors import AntiphonError
from core.wire import (
    ErrorKind,
    FinishReason,
    SamplingParams,
    StreamError,
    TokenChunk,
    TokenLogprob,
    TopLogprob,
    Usage,
)

HANG = "hang"  # in a script: no more chunks until the stream is closed
Step = TokenChunk | AntiphonError | str


@dataclass
class Call:
    """One opened stream."""

    rid: str
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    trace: str = ""
    closed: bool = False
    closed_early: bool = False


@dataclass
class FakeStreams:
    """``script`` says what each stream yields; an exception in it is raised."""

    script: Callable[[Call], Iterable[Step]]
    calls: list[Call] = field(default_factory=list)

    async def stream(
        self,
        rid: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str = "",
        priority: int = 0,
        trace: str = "",
    ) -> AsyncIterator[TokenChunk]:
        call = Call(rid, list(token_ids), params, cache_salt, priority, trace)
        self.calls.append(call)
        ended = False
        try:
            for step in self.script(call):
                await asyncio.sleep(0)
                if isinstance(step, AntiphonError):
                    raise step
                if isinstance(step, str):
                    await asyncio.Event().wait()
                    continue
                ended = step.finish is not None
                yield step
        finally:
            call.closed = True
            call.closed_early = not ended


def chunk(
    offset: int, *ids: int, finish: FinishReason | None = None, cached: int = 0
) -> TokenChunk:
    usage = Usage(prompt_tokens=0, cached_tokens=cached) if finish else None
    return TokenChunk(rid="", offset=offset, token_ids=ids, finish=finish, usage=usage)


def failure(kind: ErrorKind, message: str) -> TokenChunk:
    return TokenChunk(
        rid="", offset=0, finish=FinishReason.ERROR, error=StreamError(kind=kind, message=message)
    )


def says(
    text: str, *, eos: int | None = 257, cached: int = 0, size: int = 1
) -> Callable[[Call], list[Step]]:
    """Byte tokens of ``text``, ``size`` a chunk; ends with ``eos``, or by length without one."""

    def script(call: Call) -> list[Step]:
        ids = list(text.encode()) + ([] if eos is None else [eos])
        finish = FinishReason.LENGTH if eos is None else FinishReason.STOP
        cuts = range(0, len(ids), size)
        chunks = [
            chunk(i, *ids[i : i + size], finish=finish if i == cuts[-1] else None, cached=cached)
            for i in cuts
        ]
        if call.params.logprobs:
            chunks = [_with_logprobs(c, call.params) for c in chunks]
        return [with_scores(chunks[0], call), *chunks[1:]]

    return script


def with_scores(plain: TokenChunk, call: Call) -> TokenChunk:
    """As a worker scores a prompt: its second token has -1, the third -2, and so on."""
    count = call.params.prompt_logprobs
    if count is None:
        return plain
    top = tuple(TopLogprob(token_id=65 + i, logprob=-0.25 - i) for i in range(count))
    scores = tuple(TokenLogprob(logprob=-float(i), top=top) for i in range(1, len(call.token_ids)))
    return msgspec.structs.replace(plain, prompt_logprobs=scores)


def _with_logprobs(plain: TokenChunk, params: SamplingParams) -> TokenChunk:
    top = tuple(TopLogprob(token_id=65 + i, logprob=-1.0 - i) for i in range(params.top_logprobs))
    return TokenChunk(
        rid=plain.rid,
        offset=plain.offset,
        token_ids=plain.token_ids,
        logprobs=tuple(TokenLogprob(logprob=-0.5, top=top) for _ in plain.token_ids),
        finish=plain.finish,
        usage=plain.usage,
    )
