"""Spans from their beginning to a file or a collector; and nothing of it where tracing is off."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace.status import StatusCode

from core import config, log
from core.clock import RealClock, VirtualClock
from core.config import TracingConfig
from core.errors import ConfigError, PreflightError
from core.tracing import base, file, otlp, tracer as tracing
from core.tracing.span import SpanKind
from core.tracing.tracer import Tracer, open_tracer
from tests.support.spans import CALLER, ListSink, Traced


def test_a_span_has_its_parent_its_times_and_what_it_was_told():
    clock = VirtualClock(100.0)
    traced = Traced("decode/0/0", clock)
    root = traced.tracer.start("root", kind=SpanKind.SERVER)
    clock.advance(1.0)
    child = traced.tracer.start("child", root.traceparent)
    clock.advance(1.0)
    child.set({"n": 1})
    child.event("seen", {"what": "it"})
    child.end("it broke")
    child.set({"n": 2})
    child.end("again")
    clock.advance(1.0)
    root.end()
    first, second = traced.spans()
    assert (first.name, first.start_s, first.end_s) == ("child", 101.0, 102.0)
    assert (second.name, second.start_s, second.end_s) == ("root", 100.0, 103.0)
    assert first.trace_id == second.trace_id
    assert (first.parent_id, second.parent_id) == (second.span_id, "")
    assert (first.kind, second.kind) == (SpanKind.INTERNAL, SpanKind.SERVER)
    assert (first.error, second.error) == ("it broke", "")
    assert first.attributes == {"n": 1}
    assert [(e.name, e.at_s, e.attributes) for e in first.events] == [
        ("seen", 102.0, {"what": "it"})
    ]
    assert {first.component, second.component} == {"decode/0/0"}


def test_the_trace_of_the_caller_goes_on_and_anything_else_is_a_new_one():
    traced = Traced()
    for parent in (CALLER, "nonsense", ""):
        traced.tracer.start("s", parent).end()
    known, broken, none = traced.spans()
    assert (known.trace_id, known.parent_id) == ("ab" * 16, "cd" * 8)
    assert broken.parent_id == none.parent_id == ""
    assert len({known.trace_id, broken.trace_id, none.trace_id}) == 3


def test_what_is_not_sampled_is_no_span():
    traced = Traced(sample=0.0)
    assert traced.tracer.start("s") is None
    assert traced.tracer.start("s", CALLER[:-2] + "00") is None
    traced.tracer.start("kept", CALLER).end()
    assert [span.name for span in traced.spans()] == ["kept"]
    willing = Traced(sample=1.0)
    assert willing.tracer.start("s", CALLER[:-2] + "00") is None
    assert willing.spans() == []


def test_records_of_the_log_carry_the_trace_id_while_the_span_is_open():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        log.setup("router", "info", stream)
        traced = Traced()
        span = traced.tracer.start("s", CALLER)
        span.claim("r1")
        said = logging.getLogger("router.test")
        said.info("one", extra={"rid": "r1", "attempt": "r1.0"})
        said.info("other", extra={"rid": "r2"})
        said.info("nobody's")
        span.end()
        said.info("late", extra={"rid": "r1"})
        traced.tracer.close()
        assert not any(handler.filters for handler in root.handlers)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    one, other, nobodys, late = stream.getvalue().splitlines()
    assert f" rid=r1 attempt=r1.0 trace_id={'ab' * 16} router.test: one" in one
    assert "trace_id" not in other + nobodys + late


class Stuck(ListSink):
    """Exports nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.entered = threading.Event(), threading.Event()

    def export(self, spans):
        self.entered.set()
        assert self.may.wait(10)
        super().export(spans)


def test_spans_that_nobody_takes_are_dropped_and_block_nobody(monkeypatch, caplog):
    monkeypatch.setattr(tracing, "BACKLOG", 2)
    sink = Stuck()
    tracer = Tracer("router", [sink], clock=RealClock())
    tracer.start("s").end()
    assert sink.entered.wait(10)  # from now on nothing is taken out of the queue
    for _ in range(20):
        tracer.start("s").end()
    assert [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()] == [
        "spans are dropped: they come faster than they can be exported"
    ]
    tracer.close(timeout_s=0.01)  # does not wait for what does not come
    sink.may.set()
    tracer.close()
    assert len(sink.spans) == 3


def test_the_file_has_a_line_for_each_span_of_every_process(tmp_path):
    path = tmp_path / "spans.jsonl"
    tracers = [
        open_tracer(TracingConfig(file=str(path)), component) for component in ("router", "p/0/0")
    ]
    for tracer in tracers:
        span = tracer.start("s", CALLER)
        span.set({"reasons": ("stop",), "n": 3})
        span.end("why")
    for tracer in tracers:
        tracer.close()
    spans = file.read(path.read_text())
    assert sorted(span.component for span in spans) == ["p/0/0", "router"]
    assert {span.trace_id for span in spans} == {"ab" * 16}
    assert all(span.attributes["n"] == 3 and span.error == "why" for span in spans)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=rf"\$\.tracing\.file: cannot write {tmp_path}: Is a dir"):
        file.FileSink(TracingConfig(file=str(tmp_path)), "router")
    path = tmp_path / "none" / "spans"
    with pytest.raises(PreflightError, match=rf"there is no folder {path.parent}: make it"):
        open_tracer(TracingConfig(file=str(path)), "router")


class Broken(ListSink):
    """Fails to export until it is mended."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = True

    def export(self, spans) -> None:
        if self.broken:
            raise OSError("no room")
        super().export(spans)

    def close(self) -> None:
        super().close()
        raise OSError("no room")


def test_an_exporter_that_fails_is_told_once_and_costs_nothing_else(caplog):
    broken, whole = Broken(), ListSink()
    tracer = Tracer("router", [broken, whole], clock=RealClock())
    for _ in range(3):
        tracer.start("s").end()
    settled = threading.Event()
    tracer.put(lambda: settled.set() or ())
    assert settled.wait(10)
    broken.broken = False
    tracer.start("later").end()
    tracer.close()
    assert [span.name for span in broken.spans] == ["later"]
    assert [span.name for span in whole.spans] == ["s", "s", "s", "later"]
    assert broken.closed
    assert whole.closed
    told = [r.getMessage() for r in caplog.records]
    assert told == ["spans are lost: OSError: no room"] * 2  # while it failed, and at its end


def test_a_line_that_a_full_disk_cuts_costs_no_other(tmp_path, monkeypatch):
    path = tmp_path / "spans"
    sink = file.FileSink(TracingConfig(file=str(path)), "router")
    traced = Traced()
    for name in ("one", "half", "with\u2028in it"):
        traced.tracer.start(name).end()
    one, half, last = traced.spans()
    sink.export([one])
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(file.os, "write", lambda to, data: write(to, data[:30]))
        with pytest.raises(OSError, match="No space left"):
            sink.export([half])
    sink.export([last])
    sink.close()
    assert [span.name for span in file.read(path.read_text("utf-8"))] == ["one", last.name]


def test_the_collector_gets_what_was_recorded():
    exporter = InMemorySpanExporter()
    sink = otlp.OtlpSink(exporter, "decode/0/0")
    clock = VirtualClock(1_800_000_000.5)
    tracer = Tracer("decode/0/0", [sink], clock=clock)
    span = tracer.start("decode", CALLER, kind=SpanKind.SERVER)
    span.set({"gen_ai.response.finish_reasons": ("stop", "length"), "n": 7})
    clock.advance(0.25)
    span.event("first_token", {"k": "v"})
    clock.advance(0.25)
    span.end("stopped by the router")
    tracer.close()
    (got,) = exporter.get_finished_spans()
    assert (got.name, got.kind) == ("decode", OtelKind.SERVER)
    assert f"{got.context.trace_id:032x}" == "ab" * 16
    assert f"{got.parent.span_id:016x}" == "cd" * 8
    assert got.parent.trace_id == got.context.trace_id
    assert (got.start_time, got.end_time) == (1_800_000_000_500_000_000, 1_800_000_001_000_000_000)
    assert got.attributes == {"gen_ai.response.finish_reasons": ("stop", "length"), "n": 7}
    (event,) = got.events
    assert (event.name, event.timestamp) == ("first_token", 1_800_000_000_750_000_000)
    assert (got.status.status_code, got.status.description) == (
        StatusCode.ERROR,
        "stopped by the router",
    )
    assert got.resource.attributes["service.name"] == "antiphon-decode"
    assert got.resource.attributes["service.instance.id"] == "decode/0/0"


def test_a_span_without_a_failure_has_no_status_and_a_root_no_parent():
    exporter = InMemorySpanExporter()
    tracer = Tracer("router", [otlp.OtlpSink(exporter, "router")], clock=RealClock())
    tracer.start("s").end()
    tracer.close()
    (got,) = exporter.get_finished_spans()
    assert got.status.status_code is StatusCode.UNSET
    assert got.parent is None


def test_a_missing_library_is_named_with_the_command_that_brings_it(monkeypatch):
    wanted = TracingConfig(endpoint="http://127.0.0.1:4317")
    assert tracing.problem(wanted) is None
    monkeypatch.setattr(base, "find_spec", lambda _: None)
    with pytest.raises(PreflightError, match=r"pip install 'antiphon\[tracing\]'"):
        open_tracer(wanted, "router")
    assert tracing.problem(TracingConfig()) is None
    assert tracing.problem(TracingConfig(file="x")) is None

    def gone(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(base, "find_spec", gone)
    assert "opentelemetry-sdk" in tracing.problem(wanted)


def test_a_trace_file_that_cannot_be_one_is_named_beforehand(tmp_path, monkeypatch):
    def problem(path):
        return tracing.problem(TracingConfig(file=str(path)))

    assert "there is no folder" in problem(tmp_path / "none" / "spans")
    assert "is a folder: name a file in it" in problem(tmp_path)
    monkeypatch.setattr(tracing.os, "access", lambda path, _: path != tmp_path)
    assert "cannot be written" in problem(tmp_path / "new")
    (tmp_path / "old").touch()
    assert problem(tmp_path / "old") is None


OFF = """
import sys
import worker.host
loaded = [name for name in sys.modules if name.startswith("opentelemetry")]
import cluster.preflight, cluster.routing  # FastAPI imports the interfaces where they are installed
from core.config import TracingConfig
from core.tracing.tracer import open_tracer
cluster.preflight.read_machine()
assert open_tracer(TracingConfig(), "router") is None
open_tracer(TracingConfig(file="/dev/null"), "router").close()
parts = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
print(loaded + [name for name in sys.modules if name.startswith(parts)])
"""


def test_without_a_collector_nothing_of_opentelemetry_is_imported():
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("tracing_tree", "words"),
    [
        ({"endpoint": "localhost:4317"}, "must start with http"),
        ({"sample": 1.5}, "sample must be between 0 and 1"),
        ({"endpont": "http://x"}, "tracing"),
    ],
)
def test_the_rules_of_the_section(tracing_tree, words):
    with pytest.raises(ConfigError, match=words):
        config.load({"unified": {}, "tracing": tracing_tree})


def test_it_is_off_unless_spans_have_somewhere_to_go():
    assert not config.load({"unified": {}}).tracing.on
    assert not TracingConfig(sample=1.0).on
    assert TracingConfig(file="f").on
    assert TracingConfig(endpoint="http://x").on
