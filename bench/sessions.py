"""What is sent: turns, in sessions, that arrive at a time."""

from __future__ import annotations

from typing import NamedTuple

from bench.words import Span


class Turn(NamedTuple):
    """What a turn adds to its conversation, and how many tokens may be answered."""

    spans: tuple[Span, ...]
    output_tokens: int


class Session(NamedTuple):
    """Turns that follow each other; ``at_s`` is its own arrival time, where a trace has one."""

    turns: tuple[Turn, ...]
    at_s: float | None = None
