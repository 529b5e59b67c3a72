"""Schedulers and engines over the runner without a model, driven step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.rpc.events import Submitted
from core.wire import FinishReason, TokenChunk, TokenRequest
from tests.support.fake_runner import FakeRunner, runner_for
from tests.support.requests import request
from worker.cache.prefix_cache import PrefixCache
from worker.engine import Engine
from worker.roles.unified import UnifiedRole
from worker.scheduler.admission import Limits
from worker.scheduler.scheduler import Progress, Scheduler, Step
from worker.sequence import Sequence
from worker.streams import Streams

CONTEXT = 100


def make_scheduler(
    *,
    pages: int = 400,
    step_tokens: int = 16,
    max_running: int = 8,
    conservativeness: float = 0.0,
    schedule: str = "fcfs",
) -> Scheduler:
    limits = Limits(
        max_running=max_running,
        step_tokens=step_tokens,
        context_len=CONTEXT,
        conservativeness=conservativeness,
    )
    return Scheduler(PrefixCache(pages, 2 * max_running, CONTEXT), limits, schedule)


class Bench:
    """A scheduler and a runner; sequences leave when they have their tokens."""

    def __init__(self, **limits: Any) -> None:
        self.scheduler = make_scheduler(**limits)
        self.runner = FakeRunner(self.scheduler.cache.table, self.scheduler.cache.slots.total)
        self.outputs: dict[str, list[int]] = {}
        self.now = 0.0

    def add(
        self, rid: str, ids: list[int], max_new: int = 8, salt: str = "", priority: int = 0
    ) -> Sequence:
        wanted = request(rid, ids, max_new, salt=salt, priority=priority)
        sequence = Sequence.of(wanted, "router", CONTEXT)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[str, str, int]]:
        """Run one step: (rid, kind, tokens computed) of each row; empty when nothing can run."""
        step = self.scheduler.next_plan(self.now)
        if step is None:
            return []
        for progress in self.absorb(step):
            self._note(progress)
        self.scheduler.cache.check()
        return [(part.sequence.rid, part.kind.value, part.take) for part in step.batch]

    def absorb(self, step: Step) -> list[Progress]:
        return self.scheduler.absorb(step, self.runner.collect(self.runner.launch(step.plan)))

    def run(self, steps: int = 500) -> None:
        """Until nothing is left."""
        for _ in range(steps):
            if not self.step():
                break
        assert self.scheduler.idle

    def _note(self, progress: Progress) -> None:
        sequence = progress.sequence
        if progress.token is None:
            return
        self.outputs.setdefault(sequence.rid, []).append(progress.token)
        if sequence.finish_reason(frozenset(), CONTEXT) is not None:
            self.scheduler.remove(sequence)
            self.scheduler.cache.release(sequence)


def make_unified(
    eos: frozenset[int] = frozenset(),
    role: Callable[[Scheduler, Streams, frozenset[int]], UnifiedRole] = UnifiedRole,
    overlap: bool = False,
    **limits: Any,  # of make_scheduler
) -> Engine:
    scheduler, streams = make_scheduler(**limits), Streams()
    runner = runner_for(scheduler.cache, defers=overlap)
    behaviour = role(scheduler, streams, eos)
    return Engine(behaviour, scheduler, runner, streams, lambda peer: None, overlap=overlap)


class Listener:
    """Submits to an engine, steps it, and keeps what it says to each router."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.said: list[tuple[str, TokenChunk]] = []

    def submit(self, wanted: TokenRequest, router: str = "a") -> None:
        self.engine.handle(Submitted(router, wanted))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for router, report in self.engine.step(0.0).items():
                self.said += [(router, chunk) for chunk in report.chunks]

    def chunks(self, rid: str) -> list[TokenChunk]:
        return [chunk for _, chunk in self.said if chunk.rid == rid]

    def tokens(self, rid: str) -> list[int]:
        return [token for chunk in self.chunks(rid) for token in chunk.token_ids]

    def finishes(self, rid: str) -> list[FinishReason]:
        """Every finish that was said: there must be one."""
        return [chunk.finish for chunk in self.chunks(rid) if chunk.finish is not None]
