"""Spans as lines of a file: one JSON object each, as SpanRecord has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from core.config import TracingConfig
from core.errors import ConfigError
from core.tracing.span import SpanRecord


class FileSink:
    """Implements SpanSink. Several processes may write to one file: each write is whole lines."""

    def __init__(self, config: TracingConfig, component: str) -> None:
        """Raises ConfigError where the file cannot be written."""
        try:
            self._file = os.open(config.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"$.tracing.file: cannot write {config.file}: {error.strerror}"
            ) from error
        self._encode = msgspec.json.Encoder().encode

    def export(self, spans: Sequence[SpanRecord]) -> None:
        """See SpanSink."""
        lines = b"".join(self._encode(span) + b"\n" for span in spans)
        with suppress(OSError):  # a full disk costs spans, not requests
            os.write(self._file, lines)

    def close(self) -> None:
        """See SpanSink."""
        os.close(self._file)


def read(text: str) -> list[SpanRecord]:
    """The spans of such a file."""
    decode = msgspec.json.Decoder(SpanRecord).decode
    return [decode(line) for line in text.splitlines()]
