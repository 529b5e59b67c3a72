"""Traces: requests, some of which continue the whole conversation of another one.

A file has one JSON object a line:

    {"id": 7, "parent": 3, "t": 1.5, "msgs": [["user", [[seed, tokens], ...]], ...], "out": 80}

``t`` is the arrival in seconds, or, with a parent, the pause after the parent's end. A child's
prompt is its parent's prompt, the parent's output and its own messages. Equal seeds are equal
texts, different seeds differ from the first token on.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import numpy as np

from core.wire import Int32Array

_ROLES = ("system", "user", "assistant", "tool")
_FIRST_TOKEN = 1 << 21  # ids above: first tokens, made of the seed
_POOL = np.random.default_rng(7).integers(len(_ROLES), _FIRST_TOKEN, 400_000).astype(np.int32)
_POOL.setflags(write=False)


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace."""

    id: int
    parent: int | None
    t: float  # seconds
    msgs: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    out: int  # tokens

    def body(self) -> Int32Array:
        """The tokens of its own messages, each after a mark of its role, ready for an answer."""
        parts = []
        for role, segments in self.msgs:
            parts.append(_mark(role))
            parts += [text(seed, tokens) for seed, tokens in segments]
        return np.concatenate([*parts, _mark("assistant")])


def read(path: Path) -> list[TraceRequest]:
    """All requests of a file; parents come before their children."""
    with path.open("rb") as file:
        return [msgspec.json.decode(line, type=TraceRequest) for line in file]


def text(seed: int, tokens: int) -> Int32Array:
    """The text of a seed."""
    start = seed * 2654435761 % len(_POOL)
    ids = _POOL[(start + np.arange(tokens)) % len(_POOL)]
    ids[:1] = _FIRST_TOKEN + seed % _FIRST_TOKEN
    return ids


def answer(prompt: Int32Array, tokens: int) -> Int32Array:
    """The output of a prompt: always the same one."""
    return text(zlib.crc32(prompt.tobytes()), tokens)


def _mark(role: str) -> Int32Array:
    return np.array([_ROLES.index(role)], dtype=np.int32)
