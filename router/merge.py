"""One output out of the chunks of two legs and several attempts. Pure.

Legs may repeat offsets and overtake each other: the decode leg's second token can arrive before
the prefill leg's first. Each offset is emitted once, in order; what is early is held.

    emitted [0, next)   held: chunks that start beyond next
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.wire import (
    ErrorKind,
    FinishReason,
    Int32Array,
    Role,
    StreamError,
    TokenChunk,
    TokenLogprob,
    Usage,
)


class OutputMerge:
    """The state of one request's output at the router."""

    def __init__(self, rid: str, prompt: Int32Array) -> None:
        self._rid = rid
        self._prompt = prompt
        self._tokens: list[int] = []
        self._held: list[TokenChunk] = []
        self._cached_tokens: int | None = None
        self._scores: tuple[TokenLogprob, ...] = ()
        self._opened = False
        self._start = 0  # offset at which the attempt under way began
        self.local = False  # whether its decode leg computes the prompt itself
        self.finished = False

    @property
    def produced(self) -> int:
        """Tokens emitted so far: the offset that comes next."""
        return len(self._tokens)

    def token_ids(self) -> Int32Array:
        """Prompt and emitted output: what another attempt starts from."""
        return np.concatenate([self._prompt, np.asarray(self._tokens, dtype="<i4")])

    def restart(self) -> None:
        """Another attempt begins: what the lost one left unfinished comes again."""
        self._held.clear()
        self._start = self.produced
        self.local = False

    def accept(self, role: Role, chunk: TokenChunk) -> list[TokenChunk]:
        """Take one leg's chunk; return what can be emitted now. Nothing follows the finish."""
        if self.finished:
            return []
        # the token of the prompt's last position comes from a decode leg only if it computed it
        first = bool(chunk.token_ids) and chunk.offset == self._start
        self.local |= role is Role.DECODE and first
        self._note(role, chunk.usage)
        self._scores = self._scores or chunk.prompt_logprobs
        if chunk.finish in {FinishReason.ERROR, FinishReason.ABORT}:
            return [self._end(chunk.finish, error=chunk.error)]
        if chunk.token_ids or chunk.finish is not None:
            self._held.append(chunk)
            self._held.sort(key=lambda held: held.offset)
        ready = []
        while self._held and self._held[0].offset <= self.produced and not self.finished:
            ready.extend(self._emit(self._held.pop(0)))
        return ready

    def fail(self, kind: ErrorKind, message: str) -> TokenChunk:
        """End the output with an error."""
        return self._end(FinishReason.ERROR, error=StreamError(kind=kind, message=message))

    def stop(self, reason: FinishReason) -> TokenChunk:
        """End the output here, with what was emitted."""
        return self._end(reason)

    def _emit(self, chunk: TokenChunk) -> list[TokenChunk]:
        repeated = self.produced - chunk.offset
        fresh, logprobs = chunk.token_ids[repeated:], chunk.logprobs[repeated:]
        if chunk.finish is not None:
            return [self._end(chunk.finish, fresh, logprobs)]
        if not fresh:
            return []
        offset = self.produced
        self._tokens.extend(fresh)
        scores, usage = self._opening()
        return [
            TokenChunk(
                rid=self._rid,
                offset=offset,
                token_ids=fresh,
                logprobs=logprobs,
                prompt_logprobs=scores,
                usage=usage,
            )
        ]

    def _end(
        self,
        reason: FinishReason,
        fresh: tuple[int, ...] = (),
        logprobs: Sequence[TokenLogprob] = (),
        error: StreamError | None = None,
    ) -> TokenChunk:
        offset = self.produced
        self._tokens.extend(fresh)
        self._held.clear()
        self.finished = True
        scores, usage = self._opening()
        return TokenChunk(
            rid=self._rid,
            offset=offset,
            token_ids=fresh,
            logprobs=tuple(logprobs),
            prompt_logprobs=scores,
            finish=reason,
            usage=usage,
            error=error,
        )

    def _note(self, role: Role, usage: Usage | None) -> None:
        if usage is None:
            return
        if (role is not Role.DECODE or self.local) and self._cached_tokens is None:
            # of the first attempt: a later one would count our own output as cached prompt
            self._cached_tokens = usage.cached_tokens

    def _opening(self) -> tuple[tuple[TokenLogprob, ...], Usage | None]:
        """What goes with the first emitted chunk only: a stream may be left before its last."""
        if self._opened:
            return (), None
        self._opened = True
        cached = min(self._cached_tokens or 0, len(self._prompt))
        return self._scores, Usage(prompt_tokens=len(self._prompt), cached_tokens=cached)
