"""Spans: what took place when, and under which trace. Plain data, without a library.

A trace is all that one request does, in every process. Each span names the trace, itself and its
parent; the names that cross a process travel as a W3C ``traceparent``:

    00-<trace id, 32 hex>-<span id, 16 hex>-<flags, 2 hex; bit 0: sampled>

Times are seconds since the epoch: they are compared between processes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from enum import StrEnum

import msgspec

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


class SpanKind(StrEnum):
    """Whether a span answers somebody outside."""

    SERVER = "server"
    INTERNAL = "internal"


class SpanContext(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which span of which trace."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> SpanContext:
        """A new span of the same trace."""
        return msgspec.structs.replace(self, span_id=secrets.token_hex(8))


class SpanEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A moment within a span."""

    name: str
    at_s: float
    attributes: dict[str, Value] = {}


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A span that has ended. ``error`` says why it failed; empty: it did not."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str = ""  # empty: the root of its trace
    kind: SpanKind = SpanKind.INTERNAL
    component: str = ""  # whose it is: "router", or a rank
    start_s: float
    end_s: float
    error: str = ""
    attributes: dict[str, Value] = {}
    events: tuple[SpanEvent, ...] = ()


def parse_traceparent(header: str) -> SpanContext | None:
    """The span that a ``traceparent`` names; None where it names none, as W3C asks."""
    found = _TRACEPARENT.fullmatch(header.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return SpanContext(trace_id=trace_id, span_id=span_id, sampled=bool(int(flags, 16) & _SAMPLED))


def new_trace() -> SpanContext:
    """The first span of a trace that begins here."""
    return SpanContext(trace_id=secrets.token_hex(16), span_id=secrets.token_hex(8))


def chosen(trace_id: str, share: float) -> bool:
    """Whether a trace is among the ``share``, in [0, 1], that is kept: the same everywhere."""
    return int(trace_id[16:], 16) < share * (1 << 64)
