"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.text.request import ChosenToken, TextEvent, TokenText

_LOWEST = -9999.0  # JSON has no minus infinity

Json = dict[str, Any]  # opaque: what orjson encodes


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


class ChatLogprobs:
    """A list with an object for each token."""

    def __init__(self, top: int) -> None:
        """``top``: how many alternatives were asked for."""
        self._top = top

    def content(self, event: TextEvent) -> list[Json]:
        """The entries of one event's tokens."""
        return [
            {
                **self._entry(token),
                "top_logprobs": [self._entry(other) for other in token.top[: self._top]],
            }
            for token in event.logprobs
        ]

    @staticmethod
    def _entry(token: TokenText) -> Json:
        return {
            "token": token.text,
            "logprob": _finite(token.logprob),
            "bytes": list(token.data),
        }


class CompletionLogprobs:
    """Parallel lists. Keeps the text offset from one event of a choice to the next."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0  # characters of the tokens so far

    def body(self, tokens: Sequence[ChosenToken]) -> Json:
        """The ``logprobs`` object for some tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [_name(token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens] if self._top else None,
            "text_offset": offsets,
        }

    def _alternatives(self, token: ChosenToken) -> dict[str, float]:
        """The best alternatives and the chosen token, which may be none of them."""
        best = {_name(other): _finite(other.logprob) for other in token.top[: self._top]}
        best.setdefault(_name(token), _finite(token.logprob))
        return best


def _name(token: TokenText) -> str:
    """The token's text; part of a character gets a name of its own, as OpenAI writes it."""
    try:
        return token.data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
