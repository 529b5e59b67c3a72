"""ClusterConfig + processors -> which rank runs with what. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from cluster import model_store
from core.config import ClusterConfig, GroupConfig, RankSpec
from core.errors import ConfigError
from core.wire import RankId


@dataclass(frozen=True, slots=True)
class Cpu:
    """What of a machine's processors matters for the plan."""

    cores: int
    bf16: bool  # the CPU multiplies bfloat16 in hardware

    @classmethod
    def read(cls, cores: int, cpu_flags: frozenset[str]) -> Cpu:
        return cls(cores, bool(cpu_flags & {"avx512_bf16", "amx_bf16", "bf16"}))


def rank_specs(
    config: ClusterConfig, folder: Path, model_context: int, cpu: Cpu
) -> tuple[RankSpec, ...]:
    """One spec per rank, groups in request order. Raises ConfigError."""
    model = config.model
    if model.context_len > model_context:
        raise ConfigError(
            f"$.model.context_len is {model.context_len}, and the model was made for"
            f" {model_context} tokens: lower it"
        )
    assert model.dtype != "auto", "resolve_dtype comes first"
    dtype = model.dtype
    ranks = sum(group.replicas for group in config.groups.values())
    return tuple(
        RankSpec(
            rank=RankId(group=role.value, replica=replica),
            role=role,
            folder=str(folder),
            served_name=served_name(config),
            dtype=dtype,
            context_len=model.context_len or model_context,
            host=config.cluster.host,
            group=_resolved(group, max(1, cpu.cores // ranks)),
            disagg=config.disagg,
        )
        for role, group in config.groups.items()
        for replica in range(group.replicas)
    )


def served_name(config: ClusterConfig) -> str:
    """What clients send as "model"."""
    return config.model.served_name or model_store.served_name(config.model.source)


def resolve_dtype(config: ClusterConfig, cpu: Cpu) -> ClusterConfig:
    """The same tree without an "auto" dtype: bf16 where the CPU multiplies it, else fp32."""
    if config.model.dtype != "auto":
        return config
    model = msgspec.structs.replace(config.model, dtype="bfloat16" if cpu.bf16 else "float32")
    return msgspec.structs.replace(config, model=model)


def _resolved(group: GroupConfig, threads: int) -> GroupConfig:
    return msgspec.structs.replace(group, threads=group.threads or threads)
