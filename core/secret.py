"""Secrets of the configuration: what ``env:NAME`` and ``file:/path`` stand for.

They are read once, at start, by whoever needs them; the configuration tree keeps the reference.
"""

from __future__ import annotations

from pathlib import Path

from core import env
from core.errors import ConfigError

ENV, FILE = "env:", "file:"


def read(reference: str, key: str) -> tuple[str, ...]:
    """The secrets behind ``reference``: a variable or a file may hold several, on lines or between
    spaces; anything else is a secret itself.

    Raises ConfigError that names ``key``, the path in the configuration, and never a secret.
    """
    if reference.startswith(ENV):
        text = env.secret(reference.removeprefix(ENV))
        if text is None:
            raise ConfigError(f"{key}: the environment has no {reference.removeprefix(ENV)}")
    elif reference.startswith(FILE):
        text = _file(Path(reference.removeprefix(FILE)), key)
    else:
        text = reference
    found = tuple(text.split())
    where = reference if reference.startswith((ENV, FILE)) else "the value"
    if not found:
        raise ConfigError(f"{key}: {where} is empty")
    if not all(word.isascii() and word.isprintable() for word in found):
        raise ConfigError(f"{key}: {where} must be printable ASCII: it travels in a header")
    return found


def _file(path: Path, key: str) -> str:
    try:
        return path.read_text("ascii", "backslashreplace")
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
