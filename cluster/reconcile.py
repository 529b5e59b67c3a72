"""Desired and real state of the replicas -> what to do next. Pure: no Ray, no clock, no I/O.

    RESTING ──▶ STARTING ──ready──▶ TESTING ──passed──▶ SERVING ──unwanted──▶ DRAINING
       ▲           │                   │                   │                      │ idle, or
       └───────────┴──── crashed ──────┴───────────────────┘                      ▼ too long
                                                                      gone ◀── STOPPING

A replica that dies is started again after a back-off that grows fourfold with each crash in a row,
up to a minute, and is forgotten after a minute of serving. One that is no longer wanted is drained
first: routers send it nothing new, and it is stopped when its last request has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from core.wire import RankId

FIRST_REST_S = 0.2  # after one crash: nearly at once
LONGEST_REST_S = 60.0
HEALED_S = 60.0  # of serving, after which earlier crashes are forgotten


class Phase(StrEnum):
    """Where a replica is between not there and not there."""

    RESTING = "resting"  # waits to be started (again)
    STARTING = "starting"  # loads, no session yet
    TESTING = "testing"  # up; must first answer a request that nobody waits for
    SERVING = "serving"
    DRAINING = "draining"  # finishes what it has
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica as the supervisor knows it. ``since`` is when it entered its phase."""

    rank: RankId
    phase: Phase
    since: float
    crashes: int = 0  # in a row
    problem: str = ""  # what the last start or crash said
    due: float = 0.0  # when a resting replica may start

    def enter(self, phase: Phase, now: float) -> ReplicaState:
        return replace(self, phase=phase, since=now)

    def healed(self, now: float) -> bool:
        """It has served for so long that earlier crashes no longer count."""
        return self.phase is Phase.SERVING and now - self.since >= HEALED_S

    def crashed(self, now: float, problem: str) -> ReplicaState:
        """It died, or could not start, or failed its test: rest before the next try."""
        crashes = 1 if self.healed(now) else self.crashes + 1
        rest = min(FIRST_REST_S * 4 ** (crashes - 1), LONGEST_REST_S)
        return replace(
            self, phase=Phase.RESTING, since=now, crashes=crashes, problem=problem, due=now + rest
        )


@dataclass(frozen=True, slots=True)
class Life:
    """What there is to say of a replica at one moment."""

    rank: RankId
    phase: Phase
    crashes: int  # in a row; 0 once it has served for HEALED_S
    problem: str  # what the last crash, or failed start, said
    retry_s: float | None  # until it is tried again; None: it is not waiting for that
    doubt: str  # what makes it look bad that is not given up yet

    @classmethod
    def at(cls, state: ReplicaState, now: float, doubt: str) -> Life:
        retry_s = max(0.0, state.due - now) if state.phase is Phase.RESTING else None
        crashes, problem = (0, "") if state.healed(now) else (state.crashes, state.problem)
        return cls(state.rank, state.phase, crashes, problem, retry_s, doubt)


@dataclass(frozen=True, slots=True)
class Start:
    """Place and start this replica; then it is up, or has crashed."""

    rank: RankId


@dataclass(frozen=True, slots=True)
class Test:
    """Let it answer a request; then it serves, or has crashed."""

    __test__ = False  # not a test case for pytest
    rank: RankId


@dataclass(frozen=True, slots=True)
class Drain:
    """Send it nothing new, and say when it is idle."""

    rank: RankId


@dataclass(frozen=True, slots=True)
class Stop:
    """End its process; then it is gone."""

    rank: RankId


Action = Start | Test | Drain | Stop
ACTIVE = frozenset({Phase.RESTING, Phase.STARTING, Phase.TESTING, Phase.SERVING})


def reconcile(
    desired: Mapping[str, int],
    replicas: Mapping[RankId, ReplicaState],
    now: float,
    drain_limit_s: float,
) -> tuple[dict[RankId, ReplicaState], list[Action]]:
    """One round: the new states and what has to be done to make them true.

    Every action is started once, by the round that enters its phase; its outcome comes back as a
    state that the caller put in (``enter``, ``crashed``, or removed when stopped).
    """
    states = dict(replicas)
    actions: list[Action] = []
    for group in sorted({*desired, *(rank.group for rank in replicas)}):
        _resize(group, desired.get(group, 0), states, now, actions)
    for rank, state in list(states.items()):
        if state.phase is Phase.RESTING and now >= state.due:
            states[rank] = state.enter(Phase.STARTING, now)
            actions.append(Start(rank))
        elif state.phase is Phase.DRAINING and now - state.since >= drain_limit_s:
            states[rank] = state.enter(Phase.STOPPING, now)
            actions.append(Stop(rank))
    return states, actions


def _resize(
    group: str, wanted: int, states: dict[RankId, ReplicaState], now: float, actions: list[Action]
) -> None:
    """Add replicas under free numbers; take the newest away, those that do not serve first."""
    mine = [s for rank, s in states.items() if rank.group == group]
    active = [s for s in mine if s.phase in ACTIVE]
    taken = {s.rank.replica for s in mine}
    for number in _free_numbers(taken, wanted - len(active)):
        rank = RankId(group=group, replica=number)
        states[rank] = ReplicaState(rank, Phase.RESTING, now)
    surplus = sorted(active, key=lambda s: (s.phase is Phase.SERVING, -s.rank.replica))
    for state in surplus[: max(0, len(active) - wanted)]:
        if state.phase is Phase.SERVING:
            states[state.rank] = state.enter(Phase.DRAINING, now)
            actions.append(Drain(state.rank))
        elif state.phase is Phase.RESTING:
            del states[state.rank]
        else:  # starting or testing: nobody uses it yet
            states[state.rank] = state.enter(Phase.STOPPING, now)
            actions.append(Stop(state.rank))


def _free_numbers(taken: Iterable[int], count: int) -> list[int]:
    used, free, number = set(taken), list[int](), 0
    while len(free) < count:
        if number not in used:
            free.append(number)
        number += 1
    return free
