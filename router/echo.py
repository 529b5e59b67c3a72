"""What a client said, as it may stand in an answer or in the log: cut to a length one can read."""

from __future__ import annotations

ECHO_CHARS = 100
_DOTS = "..."


def clipped(text: object, limit: int = ECHO_CHARS) -> str:
    """``str(text)``, at most ``limit`` characters of it; dots stand for the rest."""
    whole = text if isinstance(text, str) else str(text)
    return whole if len(whole) <= limit else whole[:limit] + _DOTS


def quoted(text: str, limit: int = ECHO_CHARS) -> str:
    """``repr(text)`` of what ``clipped`` leaves: one line, whatever the text."""
    return repr(text[:limit]) + (_DOTS if len(text) > limit else "")
