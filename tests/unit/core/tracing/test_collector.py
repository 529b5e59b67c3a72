"""A collector gets the spans over OTLP, by gRPC or HTTP, and one that is away costs nobody time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from core.clock import RealClock
from core.config import TracingConfig
from core.tracing.tracer import open_tracer
from tests.support.spans import CALLER

METHOD = "Export"
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"

Got = list[ExportTraceServiceRequest]


@contextmanager
def grpc_collector() -> Iterator[tuple[str, Got]]:
    got: Got = []

    def export(request: ExportTraceServiceRequest, _: object) -> ExportTraceServiceResponse:
        got.append(request)
        return ExportTraceServiceResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        export,
        request_deserializer=ExportTraceServiceRequest.FromString,
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", got
    finally:
        server.stop(0).wait()


@contextmanager
def http_collector() -> Iterator[tuple[str, Got]]:
    got: Got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_collector_gets_the_spans(protocol):
    with {"grpc": grpc_collector, "http": http_collector}[protocol]() as (endpoint, got):
        tracer = open_tracer(TracingConfig(endpoint=endpoint, protocol=protocol), "prefill/0/0")
        tracer.start("prefill", CALLER).end("why")
        tracer.close()
    (request,) = got
    (resource,) = request.resource_spans
    named = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert named["service.name"] == "antiphon-prefill"
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "prefill",
        "ab" * 16,
        "cd" * 8,
    )
    assert (span.status.code, span.status.message) == (2, "why")


def test_a_collector_that_is_away_holds_nobody_up():
    clock = RealClock()
    tracer = open_tracer(TracingConfig(endpoint="http://127.0.0.1:9"), "router")
    before = clock.now()
    for _ in range(100):
        tracer.start("s").end()
    assert clock.now() - before < 1.0
    tracer.close(timeout_s=0.2)
    assert clock.now() - before < 2.0
