"""A tracer whose spans a test can look at."""

from __future__ import annotations

from collections.abc import Sequence

from core.clock import Clock, RealClock
from core.tracing.span import SpanRecord
from core.tracing.tracer import Tracer

CALLER = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"  # a caller's span, sampled


class ListSink:
    """Implements SpanSink."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []
        self.closed = False

    def export(self, spans: Sequence[SpanRecord]) -> None:
        self.spans += spans

    def close(self) -> None:
        self.closed = True


class Traced:
    """A tracer and what it exported, which is all there once ``spans`` has closed it."""

    def __init__(
        self, component: str = "router", clock: Clock | None = None, sample: float = 1.0
    ) -> None:
        self.sink = ListSink()
        self.tracer = Tracer(component, [self.sink], clock=clock or RealClock(), sample=sample)

    def spans(self) -> list[SpanRecord]:
        self.tracer.close()
        assert self.sink.closed
        return self.sink.spans


def named(spans: Sequence[SpanRecord], name: str) -> SpanRecord:
    """The one span whose name begins so."""
    (found,) = [span for span in spans if span.name.startswith(name)]
    return found


def check_tree(spans: Sequence[SpanRecord]) -> None:
    """One trace; each parent is there but the root's; nobody begins before its parent."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert len({span.trace_id for span in spans}) == 1
    for span in spans:
        assert span.start_s <= span.end_s
        if span.parent_id in by_id:
            assert by_id[span.parent_id].start_s <= span.start_s, span
    assert sum(span.parent_id not in by_id for span in spans) == 1
