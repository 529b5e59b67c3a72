"""What a vocabulary entry stands for, in bytes, after the ``decoder`` of a tokenizer.json.

Two families cover language models. Byte-level BPE writes each byte as one printable character.
SentencePiece writes a space as U+2581 and a byte without a character of its own as ``<0x0A>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_characters() -> dict[str, int]:
    """The table of GPT-2: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table


@dataclass(slots=True)
class TokenBytes:
    """Vocabulary entry -> bytes. Built by ``read_decoder``, not changed afterwards."""

    byte_characters: dict[str, int] | None = None  # byte-level BPE
    byte_fallback: bool = False
    replacements: list[tuple[str, str]] = field(default_factory=list)
    strips_first_space: bool = False

    def of(self, token: str) -> bytes:
        """The bytes of one entry."""
        if self.byte_characters is not None:
            return self._of_byte_level(token, self.byte_characters)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes((int(match[1], 16),))
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return token.encode("utf-8")

    @staticmethod
    def _of_byte_level(token: str, characters: dict[str, int]) -> bytes:
        try:
            return bytes([characters[c] for c in token])
        except KeyError:  # an added token, written as itself
            return token.encode("utf-8")


def read_decoder(raw: str, path: Path) -> TokenBytes:
    """Read the ``decoder`` of a tokenizer.json; raises ModelError naming what is not understood."""
    try:
        decoder = json.loads(raw).get("decoder")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error
    table = TokenBytes()
    parts = [] if decoder is None else [decoder]
    if decoder is not None and decoder.get("type") == "Sequence":
        parts = decoder["decoders"]
    for part in parts:
        apply = _PARTS.get(part.get("type"))
        if apply is None or not apply(table, part):
            raise ModelError(
                f"{path}: decoder {json.dumps(part)} is not supported; "
                f"known are {', '.join(_PARTS)} and Sequence"
            )
    return table


def _byte_level(table: TokenBytes, part: dict[str, Any]) -> bool:
    table.byte_characters = byte_characters()
    return True


def _byte_fallback(table: TokenBytes, part: dict[str, Any]) -> bool:
    table.byte_fallback = True
    return True


def _replace(table: TokenBytes, part: dict[str, Any]) -> bool:
    pattern = part.get("pattern", {}).get("String")  # the other kind is a regular expression
    if not pattern:
        return False
    table.replacements.append((pattern, part.get("content", "")))
    return True


def _metaspace(table: TokenBytes, part: dict[str, Any]) -> bool:
    table.replacements.append((part.get("replacement", "\u2581"), " "))
    table.strips_first_space = part.get("prepend_scheme", "always") != "never"
    return True


def _strip(table: TokenBytes, part: dict[str, Any]) -> bool:
    table.strips_first_space = part.get("start", 0) == 1
    return part.get("content") == " " and part.get("start", 0) <= 1 and not part.get("stop", 0)


def _fuse(table: TokenBytes, part: dict[str, Any]) -> bool:
    return True  # joining is what the detokenizer does anyway


_PARTS: dict[str, Callable[[TokenBytes, dict[str, Any]], bool]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Replace": _replace,
    "Metaspace": _metaspace,
    "Strip": _strip,
    "Fuse": _fuse,
}
