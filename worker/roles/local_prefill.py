"""Which prompts a decode rank computes itself instead of having their KV sent. Pure.

A handoff costs what it costs however little is sent: messages, the wait for a step of the prefill
rank, its queue. A remainder computed here in less time than that stays here, as a row of a step
that mostly runs anyway, and never more than one step's token budget.

Nothing is kept here before the pair has handed over once: that measures the handoff, and shows
that the way works.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Literal

Mode = Literal["auto", "off"] | int  # a number: remainders of so many tokens stay here

PROBE_TOKENS = 32  # kept here to learn what a token costs, while that is not known
SAMPLES = 16  # latest handoffs that count
FORGET = 0.9  # weight of the past when a step is measured


class Place(StrEnum):
    """Where a prompt's remainder is computed, and why."""

    LOCAL = "local"  # short enough
    LONG = "remote_long"
    OFF = "remote_off"
    FIRST = "remote_first"  # nothing has come from this prefill rank so far


@dataclass(slots=True)
class LocalPrefill:
    """The rule and what it has measured. Times in seconds."""

    mode: Mode
    budget: int  # tokens of one step
    _handoffs: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _tokens: float = 0.0  # prompt tokens computed here, the past fading
    _seconds: float = 0.0  # what they took
    _plain_s: float = 0.0  # a step without prompt tokens

    def place(self, remainder: int, *, proven: bool) -> Place:
        """For a prompt of which ``remainder`` tokens are not cached here."""
        if self.mode == "off":
            return Place.OFF
        if not proven:
            return Place.FIRST
        return Place.LOCAL if remainder <= self.threshold else Place.LONG

    @property
    def threshold(self) -> int:
        """The longest remainder, in tokens, that is computed here."""
        if self.mode == "off":
            return 0
        if self.mode != "auto":
            return self.mode
        if not self._handoffs:
            return 0
        each = self.token_s
        wanted = PROBE_TOKENS if each is None else int(self.handoff_s / max(each, 1e-9))
        return min(wanted, self.budget)

    @property
    def token_s(self) -> float | None:
        """Of computing one prompt token here; None before the first."""
        return self._seconds / self._tokens if self._tokens else None

    @property
    def handoff_s(self) -> float:
        """What recent handoffs took beyond the time for computing the same tokens here."""
        each = self.token_s or 0.0
        return median(max(0.0, took - tokens * each) for tokens, took in self._handoffs)

    def handed_over(self, tokens: int, took_s: float) -> None:
        """KV of ``tokens`` tokens was there ``took_s`` after its pages were announced."""
        self._handoffs.append((tokens, took_s))

    def stepped(self, prompt_tokens: int, decode_rows: int, took_s: float) -> None:
        """A step took so long. Beside decode rows, a prompt costs what the step took longer."""
        if not prompt_tokens:
            self._plain_s = took_s if not self._plain_s else 0.8 * self._plain_s + 0.2 * took_s
            return
        extra_s = took_s - self._plain_s if decode_rows else took_s
        self._tokens = FORGET * self._tokens + prompt_tokens
        self._seconds = FORGET * self._seconds + max(extra_s, took_s / 10)
