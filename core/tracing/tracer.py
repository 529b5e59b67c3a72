"""Tracer: begins spans, and hands those that have ended to a thread that exports them.

Where tracing is off there is no Tracer: whoever may have one holds None, and asks for no more.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from core import log as logs
from core.clock import Clock, RealClock
from core.config import TracingConfig
from core.errors import PreflightError
from core.tracing.base import FAILURES, SINKS, SpanSink, missing_otlp
from core.tracing.span import (
    Attributes,
    SpanContext,
    SpanEvent,
    SpanKind,
    SpanRecord,
    Value,
    chosen,
    new_trace,
    parse_traceparent,
)

log = logging.getLogger(__name__)

BACKLOG: Final = 4096  # batches that wait for export; more are dropped
CLOSE_S: Final = 3.0  # how long a closing process waits for what is left
NONE: Final[Mapping[str, Value]] = MappingProxyType({})

Batch = Callable[[], Sequence[SpanRecord]]  # made into records by the exporting thread


class Span:
    """A span under way. Belongs to one thread; what follows its end is ignored."""

    def __init__(
        self, tracer: Tracer, name: str, context: SpanContext, parent_id: str, kind: SpanKind
    ) -> None:
        self.context = context
        self._tracer = tracer
        self._name = name
        self._parent_id = parent_id
        self._kind = kind
        self._start_s = tracer.clock.epoch()
        self._attributes: dict[str, Value] = {}
        self._events: list[SpanEvent] = []
        self._rids: list[str] = []
        self._ended = False

    @property
    def traceparent(self) -> str:
        """What its children name as their parent, here or in another process."""
        return self.context.traceparent

    def set(self, attributes: Attributes) -> None:
        self._attributes.update(attributes)

    def event(self, name: str, attributes: Attributes = NONE) -> None:
        """Something happens now."""
        at_s = self._tracer.clock.epoch()
        self._events.append(SpanEvent(name=name, at_s=at_s, attributes=dict(attributes)))

    def claim(self, rid: str) -> None:
        """Until it ends, records of the log about ``rid`` carry its trace id."""
        self._rids.append(rid)
        self._tracer.claim(rid, self.context.trace_id)

    def end(self, error: str = "") -> None:
        """It is over; ``error`` says why where it failed."""
        if self._ended:
            return
        self._ended = True
        for rid in self._rids:
            self._tracer.disclaim(rid)
        record = SpanRecord(
            name=self._name,
            trace_id=self.context.trace_id,
            span_id=self.context.span_id,
            parent_id=self._parent_id,
            kind=self._kind,
            component=self._tracer.component,
            start_s=self._start_s,
            end_s=max(self._start_s, self._tracer.clock.epoch()),
            error=error,
            attributes=dict(self._attributes),
            events=tuple(self._events),
        )
        self._tracer.put(lambda: (record,))


class Tracer:
    """One process's spans, or one rank's. All methods but ``close`` return at once."""

    def __init__(
        self, component: str, sinks: Sequence[SpanSink], *, clock: Clock, sample: float = 1.0
    ) -> None:
        """``sample``: the share of traces kept among those that begin here."""
        self.component = component
        self.clock = clock
        self._sample = sample
        self._sinks = tuple(sinks)
        self._trace_ids: dict[str, str] = {}  # rid -> trace id, for the log
        self._unhook = logs.add_trace_ids(self._trace_ids.get)
        self._queue: queue.Queue[Batch | None] = queue.Queue(BACKLOG)
        self._dropping = False
        self._failing: set[SpanSink] = set()  # of the exporting thread
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def start(
        self, name: str, parent: str = "", *, kind: SpanKind = SpanKind.INTERNAL
    ) -> Span | None:
        """Begin a span of the trace of ``parent``, a traceparent; of a new one where that is none.

        None where the trace is not among those kept: a caller's own says so itself.
        """
        known = parse_traceparent(parent) if parent else None
        if known is not None:
            return Span(self, name, known.child(), known.span_id, kind) if known.sampled else None
        first = new_trace()
        return Span(self, name, first, "", kind) if chosen(first.trace_id, self._sample) else None

    def put(self, batch: Batch) -> None:
        """Export what ``batch`` makes, which is called by the exporting thread. Any thread."""
        try:
            self._queue.put_nowait(batch)
            self._dropping = False
        except queue.Full:
            if not self._dropping:
                log.warning("spans are dropped: they come faster than they can be exported")
            self._dropping = True

    def claim(self, rid: str, trace_id: str) -> None:
        """Records of the log about ``rid`` carry this trace id."""
        self._trace_ids[rid] = trace_id

    def disclaim(self, rid: str) -> None:
        """They do so no longer."""
        self._trace_ids.pop(rid, None)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Export what is left, as far as that is done in time. Blocks."""
        self._unhook()
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            log.warning("spans are lost: their collector does not take them")
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (batch := self._queue.get()) is not None:
                spans = batch()
                for sink in self._sinks:
                    self._attempt(sink, partial(sink.export, spans))
        finally:
            for sink in self._sinks:
                self._attempt(sink, sink.close)

    def _attempt(self, sink: SpanSink, action: Callable[[], None]) -> None:
        """A sink that fails costs spans: that is said once, until it works again."""
        try:
            action()
            self._failing.discard(sink)
        except FAILURES as error:
            if sink not in self._failing:
                log.warning("spans are lost: %s: %s", type(error).__name__, error)
            self._failing.add(sink)


def open_tracer(config: TracingConfig, component: str, clock: Clock | None = None) -> Tracer | None:
    """The tracer of a process that is ``component``; None where tracing is off.

    Raises PreflightError where a library or a folder is missing, ConfigError where the file cannot
    be written.
    """
    if not config.on:
        return None
    if found := problem(config):
        raise PreflightError(found)
    names = [name for name, on in (("file", config.file), ("otlp", config.endpoint)) if on]
    sinks = [SINKS.load(name)(config, component) for name in names]
    return Tracer(component, sinks, clock=clock or RealClock(), sample=config.sample)


def problem(config: TracingConfig) -> str | None:
    """What keeps this configuration from working here, as a line that names the fix."""
    if config.endpoint and (packages := missing_otlp()):
        return f"tracing.endpoint needs {', '.join(packages)}: pip install 'antiphon[tracing]'"
    return _file_problem(Path(config.file).absolute()) if config.file else None


def _file_problem(file: Path) -> str | None:
    folder = file.parent
    if not folder.is_dir():
        return f"tracing.file: there is no folder {folder}: make it, or choose another"
    if file.is_dir():
        return f"tracing.file: {file} is a folder: name a file in it"
    if not os.access(file if file.exists() else folder, os.W_OK):
        return f"tracing.file: {file} cannot be written: choose another"
    return None
