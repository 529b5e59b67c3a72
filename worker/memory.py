"""How many KV pages fit: from the configured tokens or bytes of a group's ranks."""

from __future__ import annotations

import torch

from core.config import GroupConfig
from core.errors import ConfigError
from worker.cache.kv_pool import bytes_per_token
from worker.model_spec import ModelSpec


def pool_tokens(spec: ModelSpec, dtype: torch.dtype, group: GroupConfig) -> int:
    """Token slots of one rank's KV pool. Raises ConfigError where not one token fits."""
    if group.kv_tokens:
        return group.kv_tokens
    per_token = bytes_per_token(spec, dtype)
    tokens = group.kv_memory_mib * 2**20 // per_token
    if tokens < 1:
        raise ConfigError(
            f"kv_memory_mib={group.kv_memory_mib} holds not one token of {per_token} bytes: "
            "raise it, or set kv_tokens"
        )
    return tokens
