"""What must hold of the rows of all sequences, at any time."""

from __future__ import annotations

import numpy as np

from worker.engine import Engine
from worker.sequence import NO_ROW


def check_salts(engine: Engine) -> None:
    """Raise AssertionError when sequences of different salts hold one page."""
    table = engine.scheduler.cache.table
    salt_of: dict[int, str] = {}
    for sequence in engine.streams.sequences():
        if sequence.row != NO_ROW:
            for slot in table.read(sequence.row, 0, sequence.allocated_len).tolist():
                held = salt_of.setdefault(slot, sequence.salt)
                assert held == sequence.salt, f"{held!r} and {sequence.salt!r} share page {slot}"


def check_pages(engine: Engine) -> None:
    """Raise AssertionError unless each page of tokens lies in one page of the pool, in order."""
    cache = engine.scheduler.cache
    for sequence in engine.streams.sequences():
        if sequence.row != NO_ROW:
            assert sequence.shared_len % cache.page_size == 0
            assert sequence.computed_len <= sequence.allocated_len
            slots = cache.table.read(sequence.row, 0, sequence.allocated_len)
            pages = slots.reshape(-1, cache.page_size)
            assert (pages[:, 0] % cache.page_size == 0).all()
            assert (pages == pages[:, :1] + np.arange(cache.page_size)).all()
