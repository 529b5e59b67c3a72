"""Spans as lines of a file: one JSON object each, as SpanRecord has them."""

from __future__ import annotations

import errno
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
        self._torn = False  # whether our last line has no end

    def export(self, spans: Sequence[SpanRecord]) -> None:
        """See SpanSink. Raises OSError where the disk is full."""
        lines = b"".join(self._encode(span) + b"\n" for span in spans)
        if self._torn:
            lines = b"\n" + lines
        count = os.write(self._file, lines)  # in one go: others write to the file, too
        if count:
            self._torn = not lines[:count].endswith(b"\n")
        if count < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """See SpanSink."""
        os.close(self._file)


def read(text: str) -> list[SpanRecord]:
    """The spans of such a file, without lines that a full disk has cut short."""
    decode = msgspec.json.Decoder(SpanRecord).decode
    spans = []
    for line in text.split("\n"):  # splitlines would cut at characters that stand in strings
        with suppress(msgspec.DecodeError):
            spans.append(decode(line))
    return spans
