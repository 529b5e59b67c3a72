"""Logging set-up: one record on stderr says when, how grave, who and which request.

    2026-11-29T17:07:01.123Z INFO    decode/0/0 rid=9f3c.0 worker.engine: first token

or, as JSON, one object a line with the keys time, level, component, rid, attempt, trace_id, logger,
message and exception, those of them that there are. ``who`` is the process's component ("router",
or a rank).

A record names its request with ``extra={"rid": rid}``. The router gives each attempt of a request
an id of its own, ``rid.0``, ``rid.1``, which is the rid that ranks know; its records name both.
Where the request is traced, the trace id is added (``add_trace_ids``).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

_QUIET = ("httpx", "httpcore", "huggingface_hub", "asyncio", "filelock")  # say too much at INFO
_REQUEST = ("rid", "attempt", "trace_id")  # what a record may say of its request


class LineFormatter(logging.Formatter):
    """Time in UTC, level, component, what the record says of its request, logger, message.

    An exception follows on lines of its own.
    """

    def __init__(self, component: str) -> None:
        super().__init__(
            "%(asctime)s %(levelname)-7s %(component)s%(request)s %(name)s: %(message)s"
        )
        self._component = component

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _moment(record) if datefmt is None else super().formatTime(record, datefmt)

    def format(self, record: logging.LogRecord) -> str:
        record.component = self._component
        record.request = "".join(f" {name}={value}" for name, value in _request(record).items())
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object for each record, always on one line."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {  # opaque: strings
            "time": _moment(record),
            "level": record.levelname,
            "component": self._component,
            **_request(record),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


_FORMATTERS = {"text": LineFormatter, "json": JsonFormatter}


def setup(
    component: str, level: str = "INFO", stream: TextIO | None = None, style: str = "text"
) -> None:
    """Send this process's records to ``stream`` (default stderr). A second call replaces the first.

    ``style`` is "text" or "json". Raises ValueError for an unknown level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_FORMATTERS[style](component))
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def add_trace_ids(lookup: Callable[[str], str | None]) -> Callable[[], None]:
    """Give records whose rid ``lookup`` knows their trace id, in the handlers that there are now.

    Returns what undoes it.
    """
    known = _TraceIds(lookup)
    handlers = logging.getLogger().handlers[:]
    for handler in handlers:
        handler.addFilter(known)

    def undo() -> None:
        for handler in handlers:
            handler.removeFilter(known)

    return undo


class _TraceIds(logging.Filter):
    """Lets everything pass."""

    def __init__(self, lookup: Callable[[str], str | None]) -> None:
        super().__init__()
        self._lookup = lookup

    def filter(self, record: logging.LogRecord) -> bool:
        rid = getattr(record, "rid", None)
        if rid is not None and (trace_id := self._lookup(rid)):
            record.trace_id = trace_id
        return True


def _request(record: logging.LogRecord) -> dict[str, str]:
    return {name: value for name in _REQUEST if (value := getattr(record, name, None))}


def _moment(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%FT%T}.{int(record.msecs):03d}Z"
