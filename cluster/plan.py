"""ClusterConfig + processors -> which rank runs with what. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from cluster import model_store
from core.config import ClusterConfig, GroupConfig, RankSpec
from core.errors import ConfigError
from core.wire import RankId, Role
from router.text.defaults import sampling_defaults
from router.text.request import ServedModel
from worker.checkpoint import declared_bytes
from worker.model_spec import ModelSpec

MIB: Final = 2**20
ELEMENT_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Cpu:
    """What of a machine's processors matters for the plan."""

    cores: int
    bf16: bool  # the CPU multiplies bfloat16 in hardware

    @classmethod
    def read(cls, cores: int, cpu_flags: frozenset[str]) -> Cpu:
        return cls(cores, bool(cpu_flags & {"avx512_bf16", "amx_bf16", "bf16"}))


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank of a cluster gets, also of replicas that are not there yet.

    ``config`` has no "auto" dtype (``resolve_dtype``). Raises ConfigError when made.
    """

    config: ClusterConfig
    folder: Path
    model: ModelSpec
    cpu: Cpu

    def __post_init__(self) -> None:
        wanted, most = self.config.model.context_len, self.model.context_len
        if wanted > most:
            raise ConfigError(
                f"$.model.context_len is {wanted}, and the model was made for {most} tokens:"
                " lower it"
            )

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        dtype = self.config.model.dtype
        assert dtype != "auto", "resolve_dtype comes first"
        return dtype

    @property
    def desired(self) -> dict[str, int]:
        """Replicas of each group, in request order."""
        return {role.value: group.replicas for role, group in self.config.groups.items()}

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_slot_bytes(ELEMENT_BYTES[self.dtype])

    @property
    def context_len(self) -> int:
        """Tokens of one request, prompt and output: no more than any rank's pool holds."""
        pools = [self._kv_tokens(group) for group in self.config.groups.values()]
        return min(self.config.model.context_len or self.model.context_len, *pools)

    @property
    def weight_bytes(self) -> int:
        """Of one rank, in the dtype it computes with."""
        stored = declared_bytes(self.folder)
        return stored * ELEMENT_BYTES[self.dtype] // ELEMENT_BYTES[self.model.dtype]

    @property
    def place(self) -> str:
        """Where ranks run, in words."""
        runtime = self.config.cluster
        if runtime.runtime == "local":
            return "this process"
        if runtime.runtime == "process" or runtime.address == "local":
            return "this machine"
        return f"Ray at {runtime.address}"

    def rank(self, rank: RankId) -> RankSpec:
        """The spec of one rank; its group is a role's name."""
        role = Role(rank.group)
        return RankSpec(
            rank=rank,
            role=role,
            folder=str(self.folder),
            served_name=served_name(self.config),
            dtype=self.dtype,
            context_len=self.context_len,
            host=self.config.cluster.host,
            group=self._resolved(self.config.groups[role]),
            disagg=self.config.disagg,
            lease=self.config.cluster.lease,
            log_level=self.config.cluster.log_level,
            log_format=self.config.cluster.log_format,
            tracing=self.config.tracing,
        )

    def ranks(self) -> tuple[RankSpec, ...]:
        """Those a fresh cluster starts with, groups in request order."""
        return tuple(
            self.rank(RankId(group=group, replica=replica))
            for group, replicas in self.desired.items()
            for replica in range(replicas)
        )

    def _resolved(self, group: GroupConfig) -> GroupConfig:
        threads = group.threads or max(1, self.cpu.cores // sum(self.desired.values()))
        return msgspec.structs.replace(group, threads=threads, kv_tokens=self._kv_tokens(group))

    def _kv_tokens(self, group: GroupConfig) -> int:
        """Whole pages."""
        tokens = group.kv_tokens or group.kv_memory_mib * MIB // self.kv_bytes_per_token
        tokens -= tokens % group.page_size
        if tokens < 2:
            least = "two tokens" if group.page_size == 1 else f"a page of {group.page_size} tokens"
            raise ConfigError(
                f"kv_memory_mib={group.kv_memory_mib} holds not even {least} of"
                f" {self.kv_bytes_per_token} bytes: raise it, or set kv_tokens"
            )
        return tokens


def served_model(plan: Plan, created: int) -> ServedModel:
    """What the front door must know; ``created`` in epoch seconds."""
    return ServedModel(
        name=served_name(plan.config),
        aliases=plan.config.model.aliases,
        context_len=plan.context_len,
        vocab_size=plan.model.vocab,
        eos_token_ids=frozenset(plan.model.eos_token_ids),
        created=created,
        sampling=sampling_defaults(plan.config.router, plan.folder),
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


def resolve_paths(config: ClusterConfig, folder: Path) -> ClusterConfig:
    """The same tree for ranks that run in another folder: its relative paths count from ``folder``.

    Keys and TLS files are read by the router alone, which runs there.
    """
    file = config.tracing.file
    if not file:
        return config
    tracing = msgspec.structs.replace(config.tracing, file=str(folder / file))
    return msgspec.structs.replace(config, tracing=tracing)
