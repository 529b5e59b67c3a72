"""How many tokens a text has at least, known from its length and a tokenizer.json alone.

A prompt that cannot fit the context need not be encoded to know it. That holds only where the
tokenizer drops nothing of a text but bytes it has no entry for, so every step of it must be known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from router.text.token_bytes import TokenBytes

Json = dict[str, Any]  # opaque: a part of tokenizer.json

_NFC_SHRINKS = 3  # composing makes UTF-8 text at most so many times shorter
_SPLITTERS = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"}
_NEVER_IN_UTF8 = bytes([0xC0, 0xC1, *range(0xF5, 0x100)])


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """A lower bound for texts of one tokenizer."""

    token_bytes: int = 0  # of a text that one token can stand for; 0: there may be no limit
    dropped: bytes = b""  # these leave no token

    def of(self, text: str) -> int:
        """Never more than the tokens of ``text``; 0 where nothing is known."""
        if not self.token_bytes:
            return 0
        return -(-len(text.encode("utf-8").translate(None, self.dropped)) // self.token_bytes)


def read_least(description: Json, table: TokenBytes, tokens: Iterable[str]) -> LeastTokens:
    """What is known of a tokenizer.json. ``tokens`` are all entries, added ones too."""
    entries = set(tokens)
    dropped = _dropped(table, entries)
    normalizers = list(_steps(description.get("normalizer"), "normalizers"))
    composes = any(step.get("type") == "NFC" for step in normalizers)
    known = (
        dropped is not None
        and not (composes and dropped)  # it may compose what is dropped then
        and all(map(_keeps_length, normalizers))
        and all(map(_keeps_all, _steps(description.get("pre_tokenizer"), "pretokenizers")))
        # these take any number of spaces with them
        and not any(t.get("lstrip") or t.get("rstrip") for t in description.get("added_tokens", ()))
    )
    if not known or dropped is None:
        return LeastTokens()
    longest = max(len(table.of(token)) for token in entries)
    return LeastTokens(longest * (_NFC_SHRINKS if composes else 1), dropped)


def _steps(part: Json | None, inner: str) -> Iterator[Json]:
    """The parts of a sequence, also of one part or none."""
    if part is None:
        return
    if part.get("type") == "Sequence":
        for step in part.get(inner, ()):
            yield from _steps(step, inner)
    else:
        yield part


def _keeps_length(normalizer: Json) -> bool:
    """Whether a text is no shorter afterwards; of NFC it is known how much shorter."""
    if normalizer.get("type") == "Replace":
        pattern = normalizer.get("pattern", {}).get("String")
        return bool(pattern) and len(pattern) <= len(normalizer.get("content", ""))
    return normalizer.get("type") in ("NFC", "Prepend")


def _keeps_all(splitter: Json) -> bool:
    return splitter.get("type") in _SPLITTERS and splitter.get("behavior") != "Removed"


def _dropped(table: TokenBytes, entries: set[str]) -> bytes | None:
    """Bytes without an entry; None where whole characters may be lost, or share a token."""
    if table.byte_characters is not None:
        missing = bytes(b for c, b in table.byte_characters.items() if c not in entries)
        return missing.translate(None, _NEVER_IN_UTF8)
    falls_back = table.byte_fallback and all(f"<0x{b:02X}>" in entries for b in range(256))
    return b"" if falls_back else None
