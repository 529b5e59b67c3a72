"""Synthetic prompts: spans of seeded tokens, rendered as words or as token ids.

A span is a key and a length; the same key always gives the same tokens, and a shorter span with it
gives the start of them. So requests share prefixes by sharing keys, and nothing is rendered before
it is sent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple, Protocol

Prompt = str | list[int]


class Span(NamedTuple):
    """``length`` tokens, all decided by ``key``."""

    key: str
    length: int


class Vocabulary(Protocol):
    """Turns spans into what an endpoint takes."""

    def render(self, spans: Sequence[Span]) -> Prompt: ...


class WordVocabulary:
    """Common English words, each with a space before it: one token each for many tokenizers."""

    def __init__(self) -> None:
        text = resources.files("bench").joinpath("words.txt").read_text("utf-8")
        self._words = [f" {word}" for word in text.split()]

    def render(self, spans: Sequence[Span]) -> str:
        return "".join(
            "".join(random.Random(span.key).choices(self._words, k=span.length)) for span in spans
        )


class IdVocabulary:
    """Token ids in ``[low, high)``: exact lengths, for endpoints that take ids."""

    def __init__(self, low: int, high: int) -> None:
        self._ids = range(low, high)

    def render(self, spans: Sequence[Span]) -> list[int]:
        ids: list[int] = []
        for span in spans:
            ids += random.Random(span.key).choices(self._ids, k=span.length)
        return ids
