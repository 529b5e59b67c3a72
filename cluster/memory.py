"""Memory: what a cluster needs by its configuration, and what this machine has.

Every rule returns the problem as one line that names the fix, or None.
"""

from __future__ import annotations

import sys
from pathlib import Path

from core.config import ClusterConfig, GroupConfig
from core.errors import PreflightError
from worker.model_spec import ModelSpec

MIB = 1 << 20
RAY_BYTES = 1024 * MIB  # head, raylet, agents and an object store that stays nearly empty
PROCESS_BYTES = 400 * MIB  # a rank or the router beyond weights and KV: Python, torch, gRPC
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


# --- the rules ----------------------------------------------------------------------------------


def memory_problem(
    config: ClusterConfig, spec: ModelSpec, weight_bytes: int, available_bytes: int
) -> str | None:
    """Weights and KV pools of every rank, the processes and Ray, against what is available.

    Not where ranks go to machines that are not known here.
    """
    if runs_elsewhere(config):
        return None
    has = f"{_gib(available_bytes)} is available"
    if alone := rank_problem(config, spec, weight_bytes, available_bytes, has):
        return alone
    parts = memory_needed(config, spec, weight_bytes)
    needed = sum(parts.values())
    if needed <= available_bytes:
        return None
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    return (
        f"this needs about {_gib(needed)} of memory ({listed}) and {has}: "
        "set a smaller kv_memory_mib, fewer replicas, or the preset cpu-unified"
    )


def plan_problem(
    config: ClusterConfig, spec: ModelSpec, weight_bytes: int, total_bytes: int
) -> str | None:
    """What no machine like this one can hold, whatever else runs on it."""
    has = f"this machine has {_gib(total_bytes)}"
    if alone := rank_problem(config, spec, weight_bytes, total_bytes, has):
        return alone
    needed = sum(memory_needed(config, spec, weight_bytes).values())
    if runs_elsewhere(config) or needed <= total_bytes:
        return None
    return (
        f"all ranks together need about {_gib(needed)} of memory, and {has}: "
        "set a smaller kv_memory_mib or fewer replicas"
    )


def rank_problem(
    config: ClusterConfig, spec: ModelSpec, weight_bytes: int, limit_bytes: int, has: str
) -> str | None:
    """A group whose single rank needs more than ``limit_bytes``; ``has`` says that in words.

    ``weight_bytes`` as in ``memory_needed``.
    """
    weights, token_bytes = _sizes(config, spec, weight_bytes)
    for role, group in config.groups.items():
        pool = _pool_bytes(group, token_bytes)
        needed = weights + pool + PROCESS_BYTES
        if needed <= limit_bytes:
            continue
        key = "kv_tokens" if group.kv_tokens else "kv_memory_mib"
        fix = f"set a smaller {role.value}.{key}"
        if weights + PROCESS_BYTES > limit_bytes:
            fix = "the model is too large for it"
        return (
            f"each {role.value} rank needs about {_gib(needed)} of memory (weights "
            f"{_gib(weights)}, a KV pool of {pool // token_bytes} tokens {_gib(pool)}), and {has}: "
            f"{fix}"
        )
    return None


def runs_elsewhere(config: ClusterConfig) -> bool:
    """Whether ranks go to the machines of a Ray cluster that somebody else has started."""
    return config.cluster.runtime == "ray" and config.cluster.address != "local"


def _sizes(config: ClusterConfig, spec: ModelSpec, weight_bytes: int) -> tuple[int, int]:
    """Bytes of one rank's weights, and of one token of KV."""
    dtype = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    weights = weight_bytes * ELEMENT_BYTES[dtype] // ELEMENT_BYTES[spec.dtype]
    return weights, spec.kv_slot_bytes(ELEMENT_BYTES[dtype])


def _pool_bytes(group: GroupConfig, token_bytes: int) -> int:
    return group.kv_tokens * token_bytes or group.kv_memory_mib * MIB


def memory_needed(config: ClusterConfig, spec: ModelSpec, weight_bytes: int) -> dict[str, int]:
    """Bytes by purpose, of all processes on this machine together.

    ``weight_bytes`` is the size on disk. A dtype of "auto" counts as the one on disk.
    """
    weights, token_bytes = _sizes(config, spec, weight_bytes)
    groups = config.groups.values()
    in_process = config.cluster.runtime == "local"
    ranks = sum(group.replicas for group in groups)
    return {
        "weights": ranks * weights,
        "KV": sum(g.replicas * _pool_bytes(g, token_bytes) for g in groups),
        "processes": (1 if in_process else ranks + 1) * PROCESS_BYTES,
        "Ray": RAY_BYTES if config.cluster.runtime == "ray" else 0,
    }


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


# --- this machine -------------------------------------------------------------------------------


def total_bytes() -> int:
    """The machine's memory, or the control group's limit where that is less."""
    total = meminfo_bytes(Path("/proc/meminfo").read_text("utf-8"), "MemTotal")
    root = Path("/sys/fs/cgroup")
    for file in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        limit = file.read_text("utf-8").strip() if file.is_file() else "max"
        total = total if limit == "max" else min(total, int(limit))
    return total


def available_bytes() -> int:
    """MemAvailable, or what the control group leaves where that is less."""
    available = meminfo_bytes(Path("/proc/meminfo").read_text("utf-8"), "MemAvailable")
    root = Path("/sys/fs/cgroup")
    for folder, limit, usage in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        if (folder / limit).is_file():
            texts = [(folder / name).read_text("utf-8") for name in (limit, usage, "memory.stat")]
            available = min(available, cgroup_available(*texts))
    return available


def cgroup_available(limit: str, usage: str, stat: str) -> int:
    """Bytes a control group may still take: its page cache counts as usage but gives way."""
    if limit.strip() == "max":
        return sys.maxsize
    stats = dict(line.split() for line in stat.splitlines())
    cache = int(stats.get("total_inactive_file", stats.get("inactive_file", "0")))
    return int(limit) - int(usage) + cache


def meminfo_bytes(meminfo: str, wanted: str) -> int:
    """A line of the text of /proc/meminfo; MemAvailable is what can be taken without swapping."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    raise PreflightError(f"/proc/meminfo has no {wanted}: antiphon needs Linux 3.14 or newer")
