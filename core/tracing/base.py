"""Where spans go: the SpanSink Protocol and the registry of its implementations."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import msgspec

from core.registry import Entry, Registry
from core.tracing.span import SpanRecord

# What a sink may raise: files and sockets, libraries, values that cannot be encoded.
FAILURES = (
    OSError, RuntimeError, TypeError, ValueError, LookupError, msgspec.MsgspecError,
)  # fmt: skip


class SpanSink(Protocol):
    """Takes ended spans out of the process. Used by one thread, which is not the callers'."""

    def export(self, spans: Sequence[SpanRecord]) -> None:
        """Take these. What cannot be delivered is dropped, with a record in the log.

        May raise one of FAILURES: its caller logs it and goes on.
        """
        ...

    def close(self) -> None:
        """Deliver what is left, and stop. May take seconds."""
        ...


def missing_otlp() -> tuple[str, ...]:
    """Packages that sending to a collector takes and that are not installed."""
    parts = {"opentelemetry-sdk": "sdk", "opentelemetry-exporter-otlp": "exporter.otlp.proto"}
    return tuple(package for package, part in parts.items() if not _installed(part))


def _installed(part: str) -> bool:
    try:
        return find_spec(f"opentelemetry.{part}") is not None
    except ModuleNotFoundError:  # of the package around it
        return False


# factories: Callable[[TracingConfig, str], SpanSink], the string being the process's component
SINKS: Registry[SpanSink] = Registry(
    "span sink",
    {
        "file": Entry("core.tracing.file:FileSink"),
        "otlp": Entry("core.tracing.otlp:make", check="core.tracing.base:missing_otlp"),
    },
)
