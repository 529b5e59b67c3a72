"""Words of the configuration that name an implementation, checked before anything starts.

A rank would refuse them too, but only once Ray is up and its place is taken. Only names are
looked at: what they stand for is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.config import ClusterConfig
from core.errors import ConfigError
from core.registry import Registry
from router.policy.base import POLICIES
from router.text.tokenizer import TOKENIZERS
from worker.attention.registry import ATTENTION


def check(config: ClusterConfig) -> None:
    """Raise ConfigError for a name that its registry does not have, with those that it has."""
    for path, registry, name in _named(config):
        if name not in registry.words:
            raise ConfigError(
                f"$.{path}: unknown {registry.kind} {name!r}: "
                f"choose one of {', '.join(registry.words)}"
            )


def _named(
    config: ClusterConfig,
) -> Iterator[tuple[str, Registry[Any], str]]:  # opaque: any Protocol
    for role, group in config.groups.items():
        yield f"{role.value}.attention", ATTENTION, group.attention
    yield "router.policy", POLICIES, config.router.policy
    yield "router.tokenizer", TOKENIZERS, config.router.tokenizer
