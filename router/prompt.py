"""The prompt as a part of the answer: its text, and how likely its tokens were. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from core.wire import TokenLogprob
from router.text.detokenizer import Detokenizer
from router.text.request import ChosenToken, Prompt, PromptText, TextRequest, Token, TokenText
from router.text.tokenizer import Tokenizer, decode


class PromptReader:
    """One prompt of a request, for all its choices: scored once, whatever their number is."""

    def __init__(
        self, request: TextRequest, tokenizer: Tokenizer, prompt: Prompt, ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        text, offsets = "", [0] * len(ids)
        if request.echo and isinstance(prompt, str):
            text = prompt
            offsets = self._offsets(text, skip_special=False, hidden=self._added(text))
        elif request.echo:
            text = decode(tokenizer, ids, skip_special=request.skip_special)
            offsets = self._offsets(text, skip_special=request.skip_special)
        self._text_offsets = offsets
        first = Token(token_id=ids[0], data=tokenizer.token_bytes(ids[0]))
        self._prompt = PromptText(text=text, first=first)

    def take(self, scores: Sequence[TokenLogprob]) -> None:
        """The log-probabilities of all tokens but the first, as the worker sent them."""
        rows = zip(self._ids[1:], scores, self._text_offsets[1:], strict=True)
        self._prompt = PromptText(
            text=self._prompt.text,
            first=self._prompt.first,
            rest=tuple(chosen_token(self._tokenizer, *row) for row in rows),
        )

    def read(self) -> PromptText:
        """What is known so far."""
        return self._prompt

    def _added(self, text: str) -> int:
        """How many leading tokens the tokenizer put there: the text does not begin with them."""
        for count, token_id in enumerate(self._ids):
            name = self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
            if not self._tokenizer.is_special(token_id) or text.startswith(name):
                return count
        return len(self._ids)

    def _offsets(self, text: str, *, skip_special: bool, hidden: int = 0) -> list[int]:
        """Where each token begins in the text: after the characters that were whole before it."""
        detokenizer = Detokenizer(self._tokenizer, skip_special=skip_special)
        at, offsets = 0, []
        for position, token_id in enumerate(self._ids):
            offsets.append(min(at, len(text)))
            if position >= hidden:
                at += len(detokenizer.push((token_id,)))
        return offsets


def chosen_token(
    tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob, offset: int
) -> ChosenToken:
    """A token and its alternatives in words."""
    token_bytes = tokenizer.token_bytes
    return ChosenToken(
        token_id=token_id,
        data=token_bytes(token_id),
        logprob=logprob.logprob,
        top=tuple(
            TokenText(token_id=t.token_id, data=token_bytes(t.token_id), logprob=t.logprob)
            for t in logprob.top
        ),
        offset=offset,
    )
