"""Is a rank still there? Answers and silences of its lease -> a verdict. Pure: no clock, no I/O.

    begun ──▶ FINE ──▶ LOST    no renewal was answered for ``lease_s``
               └─────▶ STUCK   its step loop was in one turn for ``stuck_limit_s``, twice in a row

Twice, because a machine that was frozen wakes with a turn that only looks long. Time in which the
supervisor itself stood still does not count as silence (core/lease.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from core.config import LeaseConfig
from core.lease import Health, Silence

LEAST_PATIENCE_S = 0.05
TRIES = 2  # that fit into a lease, however long each one waits


class Verdict(StrEnum):
    """What to think of a rank."""

    FINE = "fine"
    LOST = "lost"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class Lease:
    """What the supervisor has heard of one rank."""

    limits: LeaseConfig
    silence: Silence
    health: Health | None = None  # the latest
    overdue_turn: int | None = None  # the turn that was too long in the latest answer
    verdict: Verdict = Verdict.FINE
    problem: str = ""  # why the latest renewal failed

    @classmethod
    def begun(cls, limits: LeaseConfig, now: float) -> Lease:
        return cls(limits, Silence.begun(now))

    @property
    def patience_s(self) -> float:
        """How long the next renewal may wait for its answer."""
        left_s = self.limits.lease_s - self.silence.lasted_s
        return max(LEAST_PATIENCE_S, min(left_s, self.limits.lease_s / TRIES))

    @property
    def words(self) -> str:
        """The verdict, or what points to it already; empty where all is well."""
        if self.verdict is Verdict.STUCK and self.health is not None:
            return f"in one step for {self.health.busy_s:.0f} s, {self.health.doing}".rstrip(", ")
        if self.verdict is Verdict.LOST or self.problem:
            return f"no answer for {self.silence.lasted_s:.0f} s ({self.problem})"
        return ""

    def answered(self, now: float, health: Health) -> Lease:
        """A renewal got through."""
        limit = self.limits.stuck_limit_s
        overdue = health.turn if limit != "off" and health.busy_s >= limit else None
        again = overdue is not None and overdue == self.overdue_turn
        return replace(
            self,
            silence=self.silence.heard(now),
            health=health,
            overdue_turn=overdue,
            verdict=Verdict.STUCK if again else Verdict.FINE,
            problem="",
        )

    def failed(self, now: float, waited_s: float, problem: str) -> Lease:
        """A renewal did not, after at most ``waited_s``."""
        silence = self.silence.after(now, waited_s)
        lost = silence.lasted_s >= self.limits.lease_s
        verdict = Verdict.LOST if lost else Verdict.FINE
        return replace(self, silence=silence, problem=problem, verdict=verdict)

    def rested(self, now: float, pause_s: float) -> Lease:
        """The pause between two renewals is over, which was meant to take ``pause_s``."""
        return replace(self, silence=self.silence.after(now, pause_s))
