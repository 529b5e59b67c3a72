"""One choice: token chunks in, text events out. Pure: no sockets, no clock."""

from __future__ import annotations

from core.wire import FinishReason, TokenChunk
from router.failures import stream_error
from router.prompt import PromptReader, chosen_token
from router.text.detokenizer import Detokenizer
from router.text.request import ChosenToken, TextEvent, TextRequest
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
        prompt: PromptReader | None = None,
    ) -> None:
        """``silent_ids`` end the text without being part of it; ``continues`` as in Detokenizer.

        ``prompt`` where it goes back to the caller, with the first event.
        """
        self.index = index
        self.tokens = 0  # of the output, so far
        self.finish: FinishReason | None = None  # of its last event
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=request.skip_special, continues=continues
        )
        self._stop = StopMatcher(request.stops, include=request.include_stop)
        self._by_token = bool(request.stops) or request.sampling.logprobs
        self._min_tokens = request.sampling.min_new_tokens
        self._only_scores = request.max_new_tokens == 0
        self._prompt = prompt  # until the first event
        self._chars = 0 if prompt is None else len(prompt.read().text)  # of all text so far
        self._offsets: list[int] = []  # of the chunk's tokens
        self._ids: list[int] = []  # since the last event
        self._logprobs: list[ChosenToken] = []

    @property
    def done(self) -> bool:
        return self.finish is not None

    def absorb(self, chunk: TokenChunk) -> TextEvent | None:
        """Take a chunk; None while nothing can be shown. Raises the error a chunk ends with."""
        assert not self.done, chunk.rid
        if chunk.finish is FinishReason.ERROR:
            raise stream_error(chunk.error)
        if self._prompt is not None and chunk.prompt_logprobs:
            self._prompt.take(chunk.prompt_logprobs)
        ids, finish = chunk.token_ids, chunk.finish
        if self._only_scores:  # a worker samples one token at least: it is not the caller's
            return self.end(FinishReason.LENGTH if finish is not FinishReason.ABORT else finish)
        matched: str | int | None = None
        visible = ids
        if finish is FinishReason.STOP and ids and ids[-1] in self._silent_ids:
            visible, matched = ids[:-1], ids[-1]
        text, used = self._read(visible)
        if self._stop.matched is None:
            used = len(ids)
            if finish is not None:
                text += self._rest(self.tokens + len(ids))
        if self._stop.matched is not None:
            finish, matched = FinishReason.STOP, self._stop.matched
        self._keep(chunk, used)
        return self._event(text, finish, matched)

    def end(self, finish: FinishReason) -> TextEvent:
        """The last event of a choice that is ended from outside, with all text there is."""
        text = self._rest(self.tokens)
        return self._event(text, finish, None) or TextEvent(index=self.index, finish=finish)

    def _read(self, ids: tuple[int, ...]) -> tuple[str, int]:
        """The text that can be shown, and how many of the tokens it took to a stop string."""
        if not self._by_token:
            return self._detokenizer.push(ids), len(ids)
        shown = ""
        for used, token_id in enumerate(ids, start=1):
            self._offsets.append(self._chars)
            text = self._detokenizer.push((token_id,))
            self._chars += len(text)
            shown += self._stop.push(text, armed=self._armed(self.tokens + used))
            if self._stop.matched is not None:
                return shown, used
        return shown, len(ids)

    def _armed(self, tokens: int) -> bool:
        """Whether a stop string may end with the last of so many tokens."""
        return tokens > self._min_tokens

    def _rest(self, tokens: int) -> str:
        """All that was held back, at the end of the text after so many tokens."""
        text = self._stop.push(self._detokenizer.flush(), armed=self._armed(tokens))
        return text if self._stop.matched is not None else text + self._stop.flush()

    def _keep(self, chunk: TokenChunk, used: int) -> None:
        self.tokens += used
        self._ids.extend(chunk.token_ids[:used])
        if chunk.logprobs:
            self._offsets.append(self._chars)  # of a token that ends the text unseen
            rows = zip(chunk.token_ids[:used], chunk.logprobs, self._offsets, strict=False)
            self._logprobs.extend(chosen_token(self._tokenizer, *row) for row in rows)
        self._offsets.clear()

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
            prompt=None if self._prompt is None else self._prompt.read(),
        )
        self._prompt = None
        self.finish = finish
        self._ids.clear()
        self._logprobs.clear()
        return event
