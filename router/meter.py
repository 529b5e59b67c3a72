"""The numbers of one request: when it came, when its tokens came, how it ended."""

from __future__ import annotations

from core import metrics
from core.clock import Clock
from core.errors import AntiphonError, Overloaded, RequestError, Unavailable
from core.metrics import MetricSink
from router.text.request import TextUsage


class RequestMeter:
    """Made when a request arrives; ``end`` is called exactly once."""

    def __init__(self, sink: MetricSink, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self._arrived = clock.now()
        self._first = False
        self._latest: dict[int, float] = {}  # choice -> time of its latest token

    @property
    def age_s(self) -> float:
        return self._clock.now() - self._arrived

    def started(self, prompt_tokens: int) -> None:
        """The request was admitted and its prompts are tokens now."""
        self._sink.count(metrics.PROMPT_TOKENS, prompt_tokens)

    def tokens(self, index: int, count: int) -> None:
        """``count`` tokens of a choice arrived together; their interval is shared out evenly."""
        now = self._clock.now()
        self._sink.count(metrics.GENERATION_TOKENS, count)
        if not self._first:
            self._first = True
            self._sink.observe(metrics.TTFT, now - self._arrived)
        latest = self._latest.get(index)
        if latest is not None:
            for _ in range(count):
                self._sink.observe(metrics.ITL, (now - latest) / count)
        self._latest[index] = now

    def end(self, status: str, usage: TextUsage) -> None:
        """The request is over. ``status`` is a label of the ``requests`` counter."""
        self._sink.count(metrics.REQUESTS, 1, (status,))
        self._sink.count(metrics.CACHED_TOKENS, usage.cached_tokens)
        if status == "ok":
            self._sink.observe(metrics.E2E, self.age_s)
        if status == "aborted":
            self._sink.count(metrics.ABORTED)


def status_of(error: AntiphonError) -> str:
    """The ``status`` label for a request that ended with this error."""
    if isinstance(error, RequestError):
        return "invalid"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "unavailable" if isinstance(error, Unavailable) else "error"
