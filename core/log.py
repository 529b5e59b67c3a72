"""Logging set-up: one line per record on stderr, saying when, how grave, who and which request.

    2026-11-29T17:07:01.123Z INFO    decode/0/0 rid=9f3c worker.engine: first token

``who`` is the process's component ("router", or a rank). A record names its request with
``logger.info("first token", extra={"rid": rid})``.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

_QUIET = ("httpx", "httpcore", "huggingface_hub", "asyncio", "filelock")  # say too much at INFO


class LineFormatter(logging.Formatter):
    """Time in UTC, level, component, the record's rid if it has one, logger, message."""

    def __init__(self, component: str) -> None:
        super().__init__(
            "%(asctime)s %(levelname)-7s %(component)s%(request)s %(name)s: %(message)s"
        )
        self._component = component

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        return moment.strftime(datefmt) if datefmt else f"{moment:%FT%T}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        rid = getattr(record, "rid", None)
        record.component = self._component
        record.request = f" rid={rid}" if rid else ""
        return super().format(record)


def setup(component: str, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send this process's records to ``stream`` (default stderr). A second call replaces the first.

    Raises ValueError for an unknown level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(component))
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
