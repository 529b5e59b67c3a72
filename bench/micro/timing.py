"""Times of repeated runs, and what a reader has to know about the machine they ran on.

Other programs only ever add to a time, so the least one and the lower quartile say most.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds."""

    least: float
    quartile: float  # a quarter of the runs took less
    median: float

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        least, quartile, middle = np.quantile(seconds, (0.0, 0.25, 0.5))
        return cls(float(least), float(quartile), float(middle))

    def cells(self, unit_s: float) -> str:
        """Three cells of a markdown row, in units of ``unit_s``."""
        return " | ".join(
            f"{value / unit_s:.3g}" for value in (self.least, self.quartile, self.median)
        )


def measure(run: Callable[[], object], repeats: int) -> Times:
    """Times of ``repeats`` runs, after one to warm up."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return Times.of(seconds)


def load_line() -> str:
    """What else the machine has to do: its one-minute load average."""
    return f"Load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores when this began."
