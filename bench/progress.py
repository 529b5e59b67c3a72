"""A progress bar, so that a long run is not silent."""

from __future__ import annotations

from typing import TextIO

from core.clock import Clock

_WIDTH = 30
_EVERY_S = 0.1  # how often a terminal is drawn
_STEPS = 10  # lines in all where there is no terminal


class Progress:
    """A bar that redraws itself on a terminal; elsewhere a line for each tenth of the run."""

    def __init__(self, total: int, stream: TextIO, clock: Clock) -> None:
        self._total = total
        self._stream = stream
        self._clock = clock
        self._terminal = stream.isatty()
        self._start_s = clock.now()
        self._drawn_s = float("-inf")
        self._done = self._failed = self._step = 0

    def advance(self, *, failed: bool) -> None:
        """One request more has ended."""
        self._done += 1
        self._failed += failed
        if not self._terminal:
            if (step := self._done * _STEPS // self._total) > self._step:
                self._step = step
                self._stream.write(f"{self._text()}\n")
                self._stream.flush()
        elif self._done == self._total or self._clock.now() - self._drawn_s >= _EVERY_S:
            self._drawn_s = self._clock.now()
            bar = "#" * (self._done * _WIDTH // self._total)
            self._stream.write(f"\r[{bar:.<{_WIDTH}}] {self._text()}\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        """Leave the line of the bar."""
        if self._terminal and self._done:
            self._stream.write("\n")
            self._stream.flush()

    def _text(self) -> str:
        elapsed_s = self._clock.now() - self._start_s
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._done}/{self._total} requests{failed}, {elapsed_s:.0f} s"
