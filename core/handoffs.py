"""What a rank has counted of its handoffs since it started, small enough to be sent every second.

Times are kept as counts in fixed buckets, in seconds; sums of reports are sums of their fields.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import msgspec

BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class Times(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Durations: how many were at most each bound of BOUNDS_S, then how many were longer."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)  # of each bucket alone
    total_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class HandoffReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's handoffs. Counters since start, but for ``held_pages``."""

    placed: dict[str, int] = {}  # decode: where prompts were computed, and why -> requests
    phases: dict[str, Times] = {}
    failed: dict[str, int] = {}  # cause -> rooms
    prompt_tokens: int = 0  # of announced prompts
    delta_tokens: int = 0  # of those, not held by the decode rank: what crosses
    moved_bytes: int = 0  # KV written, or received
    write_s: float = 0.0  # prefill: in transport writes, all lanes together
    checked: int = 0  # rooms whose checksums were compared
    fences: int = 0  # replaced transport engines
    retries: int = 0  # rooms announced again after a fence
    held_pages: int = 0  # by rooms that are open now


@dataclass(slots=True)
class TimesCount:
    """Durations as they come in."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


@dataclass(slots=True)
class HandoffCount:
    """The counters behind a HandoffReport. Owned by one thread."""

    placed: Counter[str] = field(default_factory=Counter)
    phases: dict[str, TimesCount] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    delta_tokens: int = 0
    moved_bytes: int = 0
    write_s: float = 0.0
    checked: int = 0
    fences: int = 0
    retries: int = 0

    def took(self, phase: str, seconds: float) -> None:
        """One room has been through ``phase``."""
        self.phases.setdefault(phase, TimesCount()).add(max(0.0, seconds))

    def report(self, held_pages: int) -> HandoffReport:
        """All of it, as a value."""
        return HandoffReport(
            placed=dict(self.placed),
            phases={
                name: Times(counts=tuple(times.counts), total_s=times.total_s)
                for name, times in self.phases.items()
            },
            failed=dict(self.failed),
            prompt_tokens=self.prompt_tokens,
            delta_tokens=self.delta_tokens,
            moved_bytes=self.moved_bytes,
            write_s=self.write_s,
            checked=self.checked,
            fences=self.fences,
            retries=self.retries,
            held_pages=held_pages,
        )
