"""One choice: token chunks in, text events out. Pure: no sockets, no clock."""

from __future__ import annotations

from core.errors import AntiphonError, EngineError, Overloaded, RequestError, Unavailable
from core.wire import ErrorKind, FinishReason, StreamError, TokenChunk, TokenLogprob
from router.text.detokenizer import Detokenizer
from router.text.request import ChosenToken, TextEvent, TextRequest, TokenText
from router.text.stop import StopMatcher
from router.text.tokenizer import Tokenizer


class Choice:
    """Turns the chunks of one token stream into text; ``done`` once its last event is out."""

    def __init__(
        self,
        request: TextRequest,
        tokenizer: Tokenizer,
        *,
        index: int,
        silent_ids: frozenset[int],
        continues: bool,
    ) -> None:
        """``silent_ids`` end the text without being part of it; ``continues`` as in Detokenizer."""
        self.index = index
        self.tokens = 0  # of the output, so far
        self.done = False
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=request.skip_special, continues=continues
        )
        self._stop = StopMatcher(request.stops, include=request.include_stop)
        self._watches = bool(request.stops)
        self._ids: list[int] = []  # since the last event
        self._logprobs: list[ChosenToken] = []

    def absorb(self, chunk: TokenChunk) -> TextEvent | None:
        """Take a chunk; None while nothing can be shown. Raises the error a chunk ends with."""
        assert not self.done, chunk.rid
        if chunk.finish is FinishReason.ERROR:
            raise stream_error(chunk.error)
        ids, finish = chunk.token_ids, chunk.finish
        matched: str | int | None = None
        visible = ids
        if finish is FinishReason.STOP and ids and ids[-1] in self._silent_ids:
            visible, matched = ids[:-1], ids[-1]
        text, used = self._read(visible)
        if self._stop.matched is None:
            used = len(ids)
            if finish is not None:
                text += self._rest()
        if self._stop.matched is not None:
            finish, matched = FinishReason.STOP, self._stop.matched
        self._keep(chunk, used)
        return self._event(text, finish, matched)

    def end(self, finish: FinishReason) -> TextEvent:
        """The last event of a choice that is ended from outside, with all text there is."""
        text = self._rest()
        return self._event(text, finish, None) or TextEvent(index=self.index, finish=finish)

    def _read(self, ids: tuple[int, ...]) -> tuple[str, int]:
        """The text that can be shown, and how many of the tokens it took to a stop string."""
        if not self._watches:
            return self._detokenizer.push(ids), len(ids)
        shown = ""
        for used, token_id in enumerate(ids, start=1):
            shown += self._stop.push(self._detokenizer.push((token_id,)))
            if self._stop.matched is not None:
                return shown, used
        return shown, len(ids)

    def _rest(self) -> str:
        """All that was held back, at the end of the text."""
        text = self._stop.push(self._detokenizer.flush())
        return text if self._stop.matched is not None else text + self._stop.flush()

    def _keep(self, chunk: TokenChunk, used: int) -> None:
        self.tokens += used
        self._ids.extend(chunk.token_ids[:used])
        if chunk.logprobs:
            pairs = zip(chunk.token_ids[:used], chunk.logprobs, strict=False)
            self._logprobs.extend(self._chosen(i, p) for i, p in pairs)

    def _event(
        self, text: str, finish: FinishReason | None, matched: str | int | None
    ) -> TextEvent | None:
        if not text and finish is None:
            return None
        event = TextEvent(
            index=self.index,
            text=text,
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            finish=finish,
            matched_stop=matched,
        )
        self.done = finish is not None
        self._ids.clear()
        self._logprobs.clear()
        return event

    def _chosen(self, token_id: int, logprob: TokenLogprob) -> ChosenToken:
        token_bytes = self._tokenizer.token_bytes
        return ChosenToken(
            token_id=token_id,
            data=token_bytes(token_id),
            logprob=logprob.logprob,
            top=tuple(
                TokenText(token_id=t.token_id, data=token_bytes(t.token_id), logprob=t.logprob)
                for t in logprob.top
            ),
        )


def stream_error(error: StreamError | None) -> AntiphonError:
    """The exception for the error that ended a token stream."""
    if error is None:
        return EngineError("the token stream ended with an error and no words for it")
    match error.kind:
        case ErrorKind.INVALID:
            return RequestError(error.message)
        case ErrorKind.OVERLOADED:
            return Overloaded(error.message)
        case ErrorKind.UNAVAILABLE:
            return Unavailable(error.message)
        case ErrorKind.INTERNAL:
            return EngineError(error.message)
