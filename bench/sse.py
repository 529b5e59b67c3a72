"""Server-sent events of OpenAI endpoints, from raw bytes: lines, then typed chunks."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class PromptDetails(msgspec.Struct, frozen=True):
    """The part of ``usage`` that tells of the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts, from the server's tokenizer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct, frozen=True):
    """What chat adds; reasoning is text to the user's clock."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice of a chunk, of chat or of completions."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event. ``error`` is a string or an object with a message."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None  # opaque: servers differ


class Lines:
    """Cuts a byte stream into the payloads of its ``data:`` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that ``data`` completes; comments and other fields are left out."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in whole if line.startswith(b"data:")]

    def close(self) -> list[bytes]:
        """The payload of a last line without its line end."""
        return self.feed(b"\n") if self._rest else []


def error_text(error: Any) -> str:  # opaque: parsed JSON
    """The words of an error, whatever its form: an envelope, an object or a string."""
    while isinstance(error, dict):
        inner = error.get("error") or error.get("message") or error.get("detail")
        if inner is None:
            break
        error = inner
    return " ".join(str(error).split())[:200]
