"""Log-probabilities in the two shapes of OpenAI's API, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.text.request import ChosenToken, PromptText, TextEvent, Token, TokenText

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
    """Parallel lists."""

    def __init__(self, top: int) -> None:
        self._top = top

    def body(self, tokens: Sequence[ChosenToken], first: Token | None = None) -> Json:
        """The ``logprobs`` object for some tokens; ``first`` of an echoed prompt has none."""
        whole: Json = {
            "tokens": [_name(token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens] if self._top else None,
            "text_offset": [token.offset for token in tokens],
        }
        if first is not None:
            whole["tokens"].insert(0, _name(first))
            whole["token_logprobs"].insert(0, None)
            whole["text_offset"].insert(0, 0)
            if self._top:
                whole["top_logprobs"].insert(0, None)
        return whole

    def _alternatives(self, token: ChosenToken) -> dict[str, float]:
        """The best alternatives and the chosen token, which may be none of them."""
        best = {_name(other): _finite(other.logprob) for other in token.top[: self._top]}
        best.setdefault(_name(token), _finite(token.logprob))
        return best


def prompt_logprobs(prompt: PromptText, top: int) -> list[Json | None]:
    """vLLM's form: for each prompt token its own entry and the best alternatives, by token id."""
    return [None, *(_by_id(token, token.top[:top]) for token in prompt.rest)]


def _by_id(token: ChosenToken, top: Sequence[TokenText]) -> Json:
    """``rank`` counts from 1; null where the token is not among the alternatives."""
    ranks = {other.token_id: rank for rank, other in enumerate(top, start=1)}
    return {
        str(one.token_id): {
            "logprob": _finite(one.logprob),
            "rank": ranks.get(one.token_id),
            "decoded_token": one.text,
        }
        for one in (token, *top)
    }


def _name(token: Token) -> str:
    """The token's text; part of a character gets a name of its own, as OpenAI writes it."""
    try:
        return token.data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
