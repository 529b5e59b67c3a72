"""A runner without a model: its 'KV' is the token ids themselves, its next token a hash of them.

Because the next token depends on the content of every slot that a row names, a page that was
given to two owners, freed too early or filled by the wrong peer changes the output.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np

from core.wire import Int32Array, TokenLogprob
from worker.cache.prefix_cache import PrefixCache
from worker.cache.request_table import RequestTable
from worker.cache.slots import SlotAllocator
from worker.plan import StepPlan, StepResult

VOCAB = 50
RUBBISH = 10**6  # in a page that is free


def next_token(ids: np.ndarray) -> int:
    """The reference: what follows ``ids``."""
    return zlib.crc32(np.asarray(ids, np.int64).tobytes()) % VOCAB


def generate(prompt: list[int], count: int) -> list[int]:
    """What a request for ``count`` tokens must give."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(np.array(ids)))
    return ids[len(prompt) :]


def generate_until(prompt: list[int], count: int, stops: Container[int]) -> list[int]:
    """The same, ending with the first of ``stops``."""
    ids = generate(prompt, count)
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), count)
    return ids[:end]


@dataclass
class Ticket:
    """A launched plan, with the slots of its rows as they were."""

    plan: StepPlan
    slots: list[np.ndarray]
    result: StepResult | None = None


class PoisonedSlots(SlotAllocator):
    """Fills every page with rubbish when it becomes free."""

    def __init__(self, total: int, kv: np.ndarray, page_size: int = 1) -> None:
        super().__init__(total, page_size)
        self._kv = kv

    def release(self, slots: Int32Array) -> None:
        self._kv[slots] = RUBBISH
        super().release(slots)


def runner_for(cache: PrefixCache, *, defers: bool) -> FakeRunner:
    """A runner over a cache that is still empty, and whose free pages are poisoned from now on."""
    runner = FakeRunner(cache.table, cache.slots.total, defers=defers)
    cache.slots = PoisonedSlots(cache.slots.total, runner.kv, cache.page_size)
    return runner


class FakeRunner:
    """Implements launch and collect over a pool of one int64 per slot.

    Where it ``defers``, as a device does, a plan is run when it is collected: a page or row that
    was given away in between makes other tokens, or fails.
    """

    def __init__(self, table: RequestTable, pages: int, *, defers: bool = False) -> None:
        self.table = table
        self.defers = defers
        self.last = np.full(table.rows, -1, dtype=np.int64)  # token sampled last, by row
        self.launched: deque[Ticket] = deque()
        self.before: Callable[[], None] = lambda: None  # called with each launch
        self.kv = np.full(pages, -1, dtype=np.int64)

    def regions(self) -> tuple[tuple[int, int], ...]:
        return ((self.kv.ctypes.data, 8),)

    def launch(self, plan: StepPlan) -> Ticket:
        self.before()
        spans = zip(plan.rows, plan.kv_lens, strict=True)
        ticket = Ticket(plan, [self.table.slots[row, :end].copy() for row, end in spans])
        self.launched.append(ticket)
        assert len(self.launched) <= 1 + self.defers, "too many steps in flight"
        if not self.defers:
            ticket.result = self._run(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        assert self.launched.popleft() is ticket, "collected out of order"
        return ticket.result or self._run(ticket)

    def _run(self, ticket: Ticket) -> StepResult:
        plan, sampled, tokens = ticket.plan, {s.index for s in ticket.plan.samples}, []
        for copy in plan.copies:
            assert not (self.kv[copy.source] == RUBBISH).any(), "a page was freed before its copy"
            self.kv[copy.target] = self.kv[copy.source]
        token_ids = plan.token_ids.astype(np.int64)
        for index in plan.late:
            token_ids[plan.query_start[index]] = self.last[plan.rows[index]]
        assert (token_ids >= 0).all(), "a token was never sampled"
        for b, row in enumerate(plan.rows):
            start, end = plan.query_start[b : b + 2]
            slots = ticket.slots[b]
            assert row not in self.table._free, "a row was given away too early"
            assert len(set(slots.tolist())) == len(slots), "a row names a slot twice"
            self.kv[slots[len(slots) - (end - start) :]] = token_ids[start:end]
            if b in sampled:
                tokens.append(next_token(self.kv[slots]))
                self.last[row] = tokens[-1]
        scores = tuple(
            tuple(TokenLogprob(logprob=-float(t)) for t in row.targets) for row in plan.scores
        )
        return StepResult(tuple(tokens), tuple(None for _ in tokens), scores)
