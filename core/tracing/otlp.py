"""Spans to a collector over OTLP, by the OpenTelemetry SDK. The only file that imports it.

The SDK batches and sends on a thread of its own. What it reads from the environment is its own:
``OTEL_EXPORTER_OTLP_HEADERS`` for keys, ``OTEL_BSP_*`` for its queue, ``OTEL_RESOURCE_ATTRIBUTES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from core.config import TracingConfig
from core.tracing import span as ours

_KINDS = {ours.SpanKind.SERVER: SpanKind.SERVER, ours.SpanKind.INTERNAL: SpanKind.INTERNAL}
_HTTP_PATH = "/v1/traces"


def make(config: TracingConfig, component: str) -> OtlpSink:
    """A sink that sends to ``config.endpoint``. Connects when there is something to send."""
    if config.protocol == "http":
        base = config.endpoint.rstrip("/")
        url = base if base.endswith(_HTTP_PATH) else base + _HTTP_PATH
        return OtlpSink(HttpExporter(endpoint=url), component)
    return OtlpSink(GrpcExporter(endpoint=config.endpoint), component)


class OtlpSink:
    """Implements SpanSink over any exporter of the SDK."""

    def __init__(self, exporter: SpanExporter, component: str) -> None:
        role = component.partition("/")[0]
        release = version("antiphon")
        self._resource = Resource.create(
            {
                "service.name": f"antiphon-{role}",
                "service.namespace": "antiphon",
                "service.instance.id": component,
                "service.version": release,
            }
        )
        self._scope = InstrumentationScope("antiphon", release)
        self._processor = BatchSpanProcessor(exporter)

    def export(self, spans: Sequence[ours.SpanRecord]) -> None:
        """See SpanSink. A full queue drops spans, as the SDK's log says."""
        for record in spans:
            self._processor.on_end(self._readable(record))

    def close(self) -> None:
        """See SpanSink."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the library's

    def _readable(self, record: ours.SpanRecord) -> ReadableSpan:
        parent = _context(record.trace_id, record.parent_id) if record.parent_id else None
        status = Status(StatusCode.ERROR, record.error) if record.error else Status()
        return ReadableSpan(
            record.name,
            context=_context(record.trace_id, record.span_id),
            parent=parent,
            resource=self._resource,
            attributes=record.attributes,
            events=[
                Event(event.name, event.attributes, _ns(event.at_s)) for event in record.events
            ],
            kind=_KINDS[record.kind],
            status=status,
            start_time=_ns(record.start_s),
            end_time=_ns(record.end_s),
            instrumentation_scope=self._scope,
        )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1)
    )


def _ns(seconds: float) -> int:
    """Nanoseconds, in whole microseconds: a float of seconds since the epoch has no more."""
    return round(seconds * 1e6) * 1000
