"""A runner without a model: its 'KV' is the token ids themselves, its next token a hash of them.

Because the next token depends on the content of every slot that a row names, a page that was
given to two owners, freed too early or filled by the wrong peer changes the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from worker.cache.request_table import RequestTable
from worker.plan import StepPlan, StepResult

VOCAB = 50


def next_token(ids: np.ndarray) -> int:
    """The reference: what follows ``ids``."""
    return zlib.crc32(np.asarray(ids, np.int64).tobytes()) % VOCAB


def generate(prompt: list[int], count: int) -> list[int]:
    """What a request for ``count`` tokens must give."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(np.array(ids)))
    return ids[len(prompt) :]


class FakeRunner:
    """Implements launch and collect over a pool of one int64 per slot."""

    def __init__(self, table: RequestTable, pages: int) -> None:
        self.table = table
        self.before: Callable[[], None] = lambda: None  # called with each launch
        self.kv = np.full(pages, -1, dtype=np.int64)

    def regions(self) -> tuple[tuple[int, int], ...]:
        return ((self.kv.ctypes.data, 8),)

    def launch(self, plan: StepPlan) -> StepResult:
        self.before()
        sampled = {s.index for s in plan.samples}
        tokens = []
        for b, row in enumerate(plan.rows):
            start, end = plan.query_start[b : b + 2]
            slots = self.table.slots[row, : plan.kv_lens[b]]
            assert len(set(slots.tolist())) == len(slots), "a row names a slot twice"
            self.kv[slots[len(slots) - (end - start) :]] = plan.token_ids[start:end]
            if b in sampled:
                tokens.append(next_token(self.kv[slots]))
        return StepResult(tuple(tokens), tuple(None for _ in tokens))

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket
