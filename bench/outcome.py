"""What became of a request: its times, its tokens, its error."""

from __future__ import annotations

from itertools import pairwise

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was sent, or that could not be. Times are seconds of one monotonic clock."""

    session: int  # its number in the run
    turn: int
    due_s: float  # when it should have been sent
    start_s: float  # when it was
    end_s: float
    chunk_s: tuple[float, ...] = ()  # arrival of each chunk with text
    prompt_tokens: int | None = None  # from usage, as the next two
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def output_tokens(self) -> int:
        """From usage; without it, the chunks."""
        return len(self.chunk_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_s(self) -> float:
        """Until the first text; until the end of an answer that has none."""
        return (self.chunk_s[0] if self.chunk_s else self.end_s) - self.start_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def itl_s(self) -> list[float]:
        """The gaps between chunks (a chunk may hold several tokens)."""
        return [later - earlier for earlier, later in pairwise(self.chunk_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there are no two."""
        if len(self.chunk_s) < 2 or self.output_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_tokens - 1)

    @property
    def lag_s(self) -> float:
        """How late the load generator was."""
        return self.start_s - self.due_s
