"""Streams: the live requests of a rank, and what is to be said to their routers this step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from core.wire import (
    ErrorKind,
    FinishReason,
    StreamError,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    Usage,
)
from worker.sequence import Sequence
from worker.timeline import Mark

if TYPE_CHECKING:
    from worker.spans import RankSpans

log = logging.getLogger(__name__)


class Streams:
    """Every request that came in leaves with exactly one last chunk."""

    def __init__(self, spans: RankSpans | None = None) -> None:
        """``spans`` where requests may be traced."""
        self.spans = spans
        self._live: dict[str, Sequence] = {}
        self._chunks: dict[str, list[TokenChunk]] = {}
        self.output_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def open(self, sequence: Sequence) -> None:
        self._live[sequence.rid] = sequence
        if self.spans is not None:
            self.spans.begin(sequence)

    def find(self, rid: str) -> Sequence | None:
        """The live sequence with exactly this id, also while it is closing."""
        return self._live.get(rid)

    def of_router(self, router: str) -> list[Sequence]:
        return [s for s in self._live.values() if s.router == router]

    def __len__(self) -> int:
        return len(self._live)

    def token(
        self,
        sequence: Sequence,
        logprob: TokenLogprob | None,
        finish: FinishReason | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Say the newest token, and with ``finish`` or ``last`` that this leg is done."""
        self.output_tokens += 1
        first = not sequence.accounted
        if first:
            cached = sequence.cached_len
            log.info("first token, %d tokens cached", cached, extra={"rid": sequence.rid})
        if last or finish is not None:
            _log_end(sequence, finish, None)
        if (line := sequence.timeline) is not None:
            line.output_tokens += 1
            line.note(Mark.TOKEN)
            if last or finish is not None:
                line.end(finish, None)
        self._say(
            sequence.router,
            TokenChunk(
                rid=sequence.rid,
                offset=sequence.output_len - 1,
                token_ids=(int(sequence.tokens[sequence.length - 1]),),
                logprobs=() if logprob is None else (logprob,),
                prompt_logprobs=tuple(sequence.prompt_logprobs) if first else (),
                finish=finish,
                last=last or finish is not None,
                usage=self._usage(sequence),
            ),
        )

    def end(
        self, sequence: Sequence, finish: FinishReason | None, error: StreamError | None
    ) -> None:
        """Say that this leg is done without a further token; without a reason: the other goes on.

        A leg that leaves all to the other has no usage: the prompt was not computed here.
        """
        _log_end(sequence, finish, error)
        if sequence.timeline is not None:
            sequence.timeline.end(finish, error)
        other_goes_on = finish is None and error is None
        chunk = TokenChunk(
            rid=sequence.rid,
            offset=sequence.output_len,
            finish=finish,
            last=True,
            usage=None if other_goes_on else self._usage(sequence),
            error=error,
        )
        self._say(sequence.router, chunk)

    def refuse(self, request: TokenRequest, router: str, kind: ErrorKind, message: str) -> None:
        """Answer a request that never became a sequence."""
        log.info("refused: %s", message, extra={"rid": request.rid})
        offset = len(request.token_ids) // 4 - request.prompt_len
        error = StreamError(kind=kind, message=message)
        chunk = TokenChunk(
            rid=request.rid, offset=offset, finish=FinishReason.ERROR, last=True, error=error
        )
        self._say(router, chunk)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has given back every page."""
        del self._live[sequence.rid]
        if self.spans is not None:
            self.spans.over(sequence)

    def take(self) -> dict[str, list[TokenChunk]]:
        """All that was said since the last call, by router."""
        chunks, self._chunks = self._chunks, {}
        return chunks

    def sequences(self) -> Iterable[Sequence]:
        return self._live.values()

    def _usage(self, sequence: Sequence) -> Usage | None:
        """With a leg's first chunk only."""
        if sequence.accounted:
            return None
        sequence.accounted = True
        self.prompt_tokens += sequence.request.prompt_len
        self.cached_tokens += sequence.cached_len
        return Usage(prompt_tokens=sequence.request.prompt_len, cached_tokens=sequence.cached_len)

    def _say(self, router: str, chunk: TokenChunk) -> None:
        self._chunks.setdefault(router, []).append(chunk)


def _log_end(sequence: Sequence, finish: FinishReason | None, error: StreamError | None) -> None:
    """Only our own defects are errors here: what else went wrong, the router can judge."""
    internal = error is not None and error.kind is ErrorKind.INTERNAL
    log.log(
        logging.ERROR if internal else logging.INFO,
        "ended: %s, %d tokens of output%s",
        "left to the other leg" if finish is None else finish.value,
        sequence.output_len,
        "" if error is None else f": {error.message}",
        extra={"rid": sequence.rid},
    )
