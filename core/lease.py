"""What supervisor and rank say to each other about the rank's lease, and how both count silence.

The supervisor renews the lease of each rank it runs, about once a second; the rank answers with its
health. Either one that hears nothing for too long draws its conclusion by itself: the supervisor
kills and replaces the rank (cluster/lease.py), the rank ends itself (worker/lifeline.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

SLACK_S = 0.5  # being late by less is no reason to doubt one's own clock


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's call."""

    supervisor: str  # one life of a supervisor
    nonce: str  # which incarnation of the rank is meant: ports are used again


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The rank's answer, from its gRPC server's thread: a step that hangs does not delay it."""

    step: int  # of the engine, since start
    turn: int  # of the step loop; tells turns apart
    busy_s: float  # how long it has been in this turn; 0 between two
    doing: str = ""  # in words, where the turn has taken long


@dataclass(frozen=True, slots=True)
class Silence:
    """For how long nothing has been heard, without the time in which we ourselves stood still.

    A process that was stopped, or a machine that was frozen, wakes with all its deadlines passed
    and with answers that it has not read yet. What it slept says nothing about the other side.
    """

    since: float
    looked: float

    @classmethod
    def begun(cls, now: float) -> Silence:
        return cls(now, now)

    def heard(self, now: float) -> Silence:
        """Something came."""
        return Silence(now, now)

    def after(self, now: float, meant_s: float) -> Silence:
        """Nothing came in a wait that was meant to take at most ``meant_s``."""
        late_s = now - self.looked - meant_s
        return replace(self, since=self.since + (late_s if late_s > SLACK_S else 0.0), looked=now)

    @property
    def lasted_s(self) -> float:
        """Up to the latest look."""
        return self.looked - self.since
