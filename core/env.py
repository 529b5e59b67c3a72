"""The only module that touches the environment. Features are configured in the tree, not here."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where converted models are kept: ANTIPHON_CACHE, else XDG_CACHE_HOME, else ~/.cache."""
    if explicit := os.environ.get("ANTIPHON_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "antiphon"


def key() -> str:
    """The key that commands show to a router: ANTIPHON_KEY, else empty."""
    return os.environ.get("ANTIPHON_KEY", "")


def secret(name: str) -> str | None:
    """A variable that the configuration names as ``env:NAME``; None where it is not set."""
    return os.environ.get(name)


def set_default(name: str, value: str) -> None:
    """Set a third-party library's variable unless the operator already did."""
    os.environ.setdefault(name, value)


def assign(name: str, value: str) -> None:
    """Set a variable of this process for a library that is not loaded yet."""
    os.environ[name] = value
