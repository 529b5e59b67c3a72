"""What travels between processes is W3C's traceparent."""

from __future__ import annotations

import pytest

from core.tracing.span import SpanContext, chosen, new_trace, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_traceparent_is_read_and_written():
    header = f"00-{TRACE}-{SPAN}-01"
    context = parse_traceparent(header)
    assert context == SpanContext(trace_id=TRACE, span_id=SPAN, sampled=True)
    assert context.traceparent == header
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-00").traceparent == f"00-{TRACE}-{SPAN}-00"


def test_flags_and_versions_to_come_do_not_matter():
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-03").sampled
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes").trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE[1:]}-{SPAN}-01",
    ],
)
def test_what_is_no_traceparent_is_none(header):
    assert parse_traceparent(header) is None


def test_a_child_is_another_span_of_the_same_trace():
    context = new_trace()
    child = context.child()
    assert child.trace_id == context.trace_id
    assert child.span_id != context.span_id
    assert parse_traceparent(child.traceparent) == child


def test_the_share_of_traces_kept_goes_by_their_ids():
    ids = [f"{'7' * 16}{i:02x}{'0' * 14}" for i in range(256)]
    assert not any(chosen(i, 0.0) for i in ids)
    assert all(chosen(i, 1.0) for i in ids)
    assert chosen("f" * 32, 1.0)
    assert sum(chosen(i, 0.25) for i in ids) == 64
