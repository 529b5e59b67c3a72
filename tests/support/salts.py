"""What must hold while requests of several cache salts run."""

from __future__ import annotations

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
