"""``[PRESET] path=value ...``: how commands are told which cluster is meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.errors import ConfigError

if TYPE_CHECKING:
    from core.config import ClusterConfig

DEFAULT_PRESET = "cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words, and ``--model``."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PRESET | path=value",
        help="a preset or a YAML file (default: cpu), then overrides such as router.port=8001",
    )
    parser.add_argument("--model", help="a folder, a hub name owner/model, or a built-in name")


def read(args: argparse.Namespace) -> ClusterConfig:
    """The configuration that the arguments name; raises ConfigError."""
    from cluster import names
    from core import presets

    preset, overrides = split(args.words)
    if args.model:
        overrides = (*overrides, f"model.source={args.model}")
    if getattr(args, "verbose", False):
        overrides = ("cluster.log_level=info", *overrides)
    config = presets.read(preset, overrides)
    names.check(config)
    return config


def split(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The preset and the overrides, in whatever order they came."""
    overrides = tuple(w for w in words if "=" in w)
    named = [w for w in words if "=" not in w]
    if len(named) > 1:
        raise ConfigError(f"give one preset, not {' and '.join(named)}")
    return (named[0] if named else DEFAULT_PRESET), overrides
