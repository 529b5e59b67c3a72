"""Recorder: the last turns of a step loop, and what it is doing now. The flight recorder.

The step thread writes; any thread may read, without a lock: every attribute that another thread
reads is replaced in one assignment. Recording a turn takes a few microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.clock import Clock
from core.dump import Busy, StepRecord
from worker.plan import RowKind
from worker.scheduler.scheduler import Scheduled, Step

KEPT = 256  # turns
LONG_S = 0.05  # a turn without a step is kept when it took this long


@dataclass(frozen=True, slots=True)
class Planned:
    """What a turn runs."""

    step: int = 0  # of the engine, since start
    extend_rows: int = 0
    decode_rows: int = 0
    tokens: int = 0
    batch: tuple[Scheduled, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """How an engine stands at the end of a turn."""

    running: int = 0
    waiting: int = 0
    live: int = 0
    free_pages: int = 0
    retractions: int = 0


class Recorder:
    """``begin``, then ``lap`` at the end of each part and ``planned`` when known, then ``end``."""

    def __init__(self, clock: Clock, kept: int = KEPT) -> None:
        self.clock = clock
        self.busy_s = 0.0  # in turns that ran a step, since start
        self.last_step_s = 0.0
        self._ring: list[StepRecord | None] = [None] * kept
        self._written = 0
        self._turn = 0
        self._began: float | None = None  # None: between two turns
        self._at = 0.0
        self._lap = ""
        self._lap_began = 0.0
        self._laps: dict[str, float] = {}
        self._plan = Planned()

    # --- the step thread ----------------------------------------------------------------------

    def begin(self, first_lap: str) -> None:
        """A turn begins, with the part of this name."""
        now = self.clock.now()
        self._turn += 1
        self._at = self.clock.epoch()
        self._lap, self._lap_began = first_lap, now
        self._laps = {}
        self._began = now

    def lap(self, name: str) -> None:
        """The part before ends, and the part ``name`` begins."""
        now = self.clock.now()
        self._laps[self._lap] = now - self._lap_began
        self._lap, self._lap_began = name, now

    def planned(self, number: int, step: Step) -> None:
        """The turn runs this step of the engine."""
        kinds = step.plan.kinds
        decodes = kinds.count(RowKind.DECODE)
        self._plan = Planned(number, len(kinds) - decodes, decodes, step.plan.tokens, step.batch)

    def end(self, facts: Facts) -> None:
        """The turn is over."""
        assert self._began is not None, "end without begin"
        now, plan = self.clock.now(), self._plan
        self._laps[self._lap] = now - self._lap_began
        took_s = now - self._began
        self._began = None
        self._plan = Planned(step=plan.step)  # lets go of the sequences
        if plan.batch:
            self.busy_s += took_s
            self.last_step_s = took_s
        elif took_s < LONG_S:
            return
        self._ring[self._written % len(self._ring)] = StepRecord(
            step=plan.step,
            at=self._at,
            took_s=took_s,
            laps=self._laps,
            extend_rows=plan.extend_rows,
            decode_rows=plan.decode_rows,
            tokens=plan.tokens,
            running=facts.running,
            waiting=facts.waiting,
            live=facts.live,
            free_pages=facts.free_pages,
            retractions=facts.retractions,
        )
        self._written += 1

    # --- any thread ---------------------------------------------------------------------------

    @property
    def at(self) -> tuple[int, int]:
        """The engine's step and the loop's turn, the latest of each."""
        return self._plan.step, self._turn

    def busy(self) -> Busy | None:
        """The turn under way, None between two."""
        turn, began, plan = self._turn, self._began, self._plan
        if began is None:
            return None
        return Busy(
            turn=turn,
            for_s=max(0.0, self.clock.now() - began),
            lap=self._lap,
            step=plan.step,
            extend_rows=plan.extend_rows,
            decode_rows=plan.decode_rows,
            tokens=plan.tokens,
            rids=tuple(part.sequence.rid for part in plan.batch),
        )

    def records(self) -> tuple[StepRecord, ...]:
        """The turns kept, oldest first."""
        at, ring = self._written % len(self._ring), list(self._ring)
        return tuple(record for record in ring[at:] + ring[:at] if record is not None)
