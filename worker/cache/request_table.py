"""RequestTable, the first pool table: a row per sequence that owns pages -> its token slots.

The second table is the KV pool, slot -> keys and values. Rows are int64, the type index
operations want, so a CPU step reads them in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from core.wire import Int32Array

Int64Array = npt.NDArray[np.int64]


class RequestTable:
    """``slots[row, position]`` is where the KV of that token lives."""

    def __init__(self, rows: int, width: int) -> None:
        self.slots: Int64Array = np.zeros((rows, width), dtype=np.int64)
        self._free = list(range(rows - 1, -1, -1))
        self.rows = rows

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row; the caller has asked ``free`` before."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        assert row not in self._free, f"row {row} freed twice"
        self._free.append(row)

    def reset(self, taken: Iterable[int]) -> None:
        """Forget everything: exactly these rows are taken."""
        self._free = sorted(set(range(self.rows)) - set(taken), reverse=True)

    def write(self, row: int, start: int, slots: Int32Array) -> None:
        self.slots[row, start : start + len(slots)] = slots

    def read(self, row: int, start: int, end: int) -> Int32Array:
        """A copy, as int32."""
        return self.slots[row, start:end].astype(np.int32)
