"""Recorded traffic: the Mooncake (jsonl) and Azure (csv) traces as sessions.

A Mooncake trace names the chained 512-token blocks of each prompt: equal ids are equal prefixes.
Here a block is a span with its id as the key, so equal ids are equal tokens. An Azure trace has
arrivals and lengths only; its prompts share nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec

from bench.config import BenchConfig
from bench.sessions import Session, Turn
from bench.words import Span
from core.errors import ConfigError

BLOCK_TOKENS = 512  # of the Mooncake traces


class MooncakeLine(msgspec.Struct, frozen=True):
    """One request of a Mooncake trace; the time is milliseconds since its start."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


Reader = Callable[[Iterable[str], int, float], Iterator[Session]]


def read(config: BenchConfig) -> list[Session]:
    """The first ``requests`` sessions of the trace, by time; ConfigError names file and line."""
    path = Path(config.trace)
    readers: dict[str, Reader] = {".jsonl": mooncake, ".csv": azure}
    if path.suffix not in readers:
        raise ConfigError(f"--trace {path}: must be .jsonl (Mooncake) or .csv (Azure)")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            every = readers[path.suffix](lines, config.seed, config.length_scale)
            sessions = list(islice(every, config.requests))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"--trace {path}, {error}") from error
    if not sessions:
        raise ConfigError(f"--trace {path}: no requests in it")
    return sorted(sessions, key=lambda session: session.at_s or 0.0)


def mooncake(lines: Iterable[str], seed: int, scale: float) -> Iterator[Session]:
    """Parse lines of JSON; lengths and blocks shrink by ``scale`` together."""
    block = _scaled(BLOCK_TOKENS, scale)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=MooncakeLine)
        except msgspec.DecodeError as error:
            raise ConfigError(f"line {number}: {error}") from error
        blocks = -(-entry.input_length // BLOCK_TOKENS)
        if not blocks or blocks != len(entry.hash_ids):
            raise ConfigError(
                f"line {number}: {entry.input_length} tokens need {blocks or 'some'} hash_ids, "
                f"not {len(entry.hash_ids)}"
            )
        last = _scaled(entry.input_length - (blocks - 1) * BLOCK_TOKENS, scale)
        lengths = [*[block] * (blocks - 1), last]
        spans = tuple(
            Span(f"{seed}/block/{key}", length)
            for key, length in zip(entry.hash_ids, lengths, strict=True)
        )
        yield _session(spans, _scaled(entry.output_length, scale), entry.timestamp / 1000)


def azure(lines: Iterable[str], seed: int, scale: float) -> Iterator[Session]:
    """Parse the table; times count from its first row."""
    start: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            tokens, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"line {number}: not a row of TIMESTAMP, ContextTokens, GeneratedTokens: {error!r}"
            ) from error
        start = start or at
        span = Span(f"{seed}/row/{number}", _scaled(tokens, scale))
        yield _session((span,), _scaled(answer, scale), (at - start).total_seconds())


def _session(spans: tuple[Span, ...], output_tokens: int, at_s: float) -> Session:
    return Session((Turn(spans, output_tokens),), at_s)


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
