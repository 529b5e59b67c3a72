"""How many token streams may live at once. One more is refused with the time to come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core.clock import Clock
from core.errors import Overloaded, RequestError

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
_WEIGHT = 0.1  # of the newest request in the running mean of their lifetimes


class Admission:
    """Counts live streams: a request with n choices of p prompts is n * p of them."""

    def __init__(self, limit: int, clock: Clock) -> None:
        assert limit >= 1, limit
        self._limit = limit
        self._clock = clock
        self._live = 0
        self._lifetime_s = 0.0  # running mean

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def live(self) -> int:
        return self._live

    @contextmanager
    def ticket(self, streams: int) -> Iterator[None]:
        """Hold a place for ``streams`` streams while the body runs.

        Raises Overloaded when they do not fit now, RequestError when they never will.
        """
        if streams > self._limit:
            raise RequestError(
                f"the request asks for {streams} choices at once, this server takes "
                f"{self._limit} (router.queue_limit)",
                param="n",
            )
        if self._live + streams > self._limit:
            raise Overloaded(
                f"{self._live} of {self._limit} places are taken (router.queue_limit); "
                "try again later",
                retry_after_s=self._retry_after_s(),
            )
        started = self._clock.now()
        self._live += streams
        try:
            yield
        finally:
            self._live -= streams
            lifetime_s = self._clock.now() - started
            self._lifetime_s += _WEIGHT * (lifetime_s - self._lifetime_s)

    def _retry_after_s(self) -> float:
        """About when the next place is free, if the places empty as they did so far."""
        expected = self._lifetime_s / max(self._live, 1)
        return min(max(expected, _MIN_RETRY_S), _MAX_RETRY_S)
