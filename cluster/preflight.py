"""Check the machine before anything starts: packages, libraries, port, memory.

Every check is a function that returns the problem as one line that names the fix, or None. What
the checks need to know is read into ``Machine`` first, so that the rules run on any machine.
"""

from __future__ import annotations

import ctypes
import errno
import shutil
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster import model_store
from core.config import ClusterConfig, GroupConfig
from core.errors import OperatorError, PreflightError
from core.registry import Registry
from core.tracing import tracer as tracing
from router.keys import read_keys
from router.policy.base import POLICIES
from router.text.tokenizer import TOKENIZERS
from router.tls import read_tls
from worker.architectures import read_spec
from worker.checkpoint import weight_bytes
from worker.model_spec import ModelSpec

MIB = 1 << 20
RAY_BYTES = 1024 * MIB  # head, raylet, agents and an object store that stays nearly empty
PROCESS_BYTES = 400 * MIB  # a rank or the router beyond weights and KV: Python, torch, gRPC
SHM_BYTES = 256 * MIB  # below this Ray keeps its object store in /tmp
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# extra in pyproject.toml -> modules that show that it is installed
EXTRAS = {
    "cpu": ("torch", "numpy", "safetensors", "mooncake", "xxhash"),
    "serve": (
        "fastapi",
        "uvicorn",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "grpc_status",
        "tokenizers",
        "jinja2",
        "prometheus_client",
        "xxhash",
    ),
    "ray": ("ray",),
}


@dataclass(frozen=True)
class Machine:
    """What the checks need to know of this machine."""

    available_bytes: int  # memory that can be taken now, within the container's limit
    shm_bytes: int  # free in /dev/shm
    absent: frozenset[str]  # of the modules in EXTRAS, those that cannot be imported
    has_ibverbs: bool


def read_machine() -> Machine:
    """Look at this machine. Starts nothing and imports no heavy package."""
    modules = {module for extra in EXTRAS.values() for module in extra}
    shm = Path("/dev/shm")
    return Machine(
        available_bytes=_available_bytes(),
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        absent=frozenset(module for module in modules if find_spec(module) is None),
        has_ibverbs=_loads("libibverbs.so.1"),
    )


def check(config: ClusterConfig, folder: Path, machine: Machine | None = None) -> tuple[str, ...]:
    """Raise PreflightError with every problem, one a line; return what is only worth a warning.

    Raises ConfigError where keys or TLS files cannot be read, ModelError when ``folder`` is not a
    model that can be served.
    """
    machine = machine or read_machine()
    read_keys(config.router)
    read_tls(config.router)
    model_store.check_folder(folder)
    spec = read_spec(folder)
    found = (
        packages_problem(config, machine),
        tracing.problem(config.tracing),
        backend_problem(POLICIES, config.router.policy),
        backend_problem(TOKENIZERS, config.router.tokenizer),
        ibverbs_problem(config, machine),
        port_problem(config.router.host, config.router.port),
        grpc_port_problem(config),
        memory_problem(config, spec, weight_bytes(folder), machine),
    )
    if problems := [problem for problem in found if problem is not None]:
        raise PreflightError("\n".join(problems))
    warning = shm_warning(config, machine)
    return () if warning is None else (warning,)


# --- packages and libraries ---------------------------------------------------------------------


def packages_problem(config: ClusterConfig, machine: Machine) -> str | None:
    """Python packages that this configuration uses and the environment lacks."""
    extras = [e for e in EXTRAS if e != "ray" or config.cluster.runtime == "ray"]
    needed = {module for extra in extras for module in EXTRAS[extra]}
    if not _uses_mooncake(config):
        needed.discard("mooncake")
    missing = sorted(needed & machine.absent)
    if not missing:
        return None
    return f"missing packages {', '.join(missing)}: pip install 'antiphon[{','.join(extras)}]'"


def backend_problem(registry: Registry[Any], name: str) -> str | None:  # opaque: any Protocol
    """A word of the configuration that no usable implementation goes by."""
    try:
        registry.load(name)
    except OperatorError as error:
        return str(error)
    return None


def ibverbs_problem(config: ClusterConfig, machine: Machine) -> str | None:
    """The system library that Mooncake is linked with, for TCP too."""
    if machine.has_ibverbs or not _uses_mooncake(config):
        return None
    return "Mooncake needs the library libibverbs.so.1: apt-get install -y libibverbs1"


def _uses_mooncake(config: ClusterConfig) -> bool:
    return config.unified is None and config.disagg.transport.startswith("mooncake")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# --- the port -----------------------------------------------------------------------------------


def grpc_port_problem(config: ClusterConfig) -> str | None:
    """The same for the gRPC front, where it is wanted."""
    if not config.router.grpc:
        return None
    problem = port_problem(config.router.host, config.router.grpc_port, key="router.grpc_port")
    return problem and f"{problem}, or switch gRPC off with router.grpc=false"


def port_problem(host: str, port: int, *, key: str = "router.port") -> str | None:
    """Whether the router can listen there; port 0 (any free one) always can.

    ``key`` is the one of the configuration that names the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            owner = port_owner(port)
            by = f" (by {owner})" if owner else ""
            return f"port {port} is in use{by}: stop it, or choose another with {key}=..."
        if error.errno == errno.EACCES:
            return f"port {port} needs root: choose one above 1023 with {key}=..."
        return f"cannot listen on {host}:{port}: {error.strerror}: set router.host and {key}"
    return None


def port_owner(port: int) -> str | None:
    """Name and pid of the process that listens on a TCP port, where we may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).is_file():
            inodes |= listening_inodes(Path(table).read_text("utf-8"), port)
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) in links for fd in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text('utf-8').strip()}, pid {process.name}"
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    return None


def listening_inodes(table: str, port: int) -> set[str]:
    """Socket inodes that listen on ``port``, from the text of /proc/net/tcp."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}


# --- memory -------------------------------------------------------------------------------------


def memory_problem(
    config: ClusterConfig, spec: ModelSpec, weight_bytes: int, machine: Machine
) -> str | None:
    """Weights and KV pools of every rank, the processes and Ray, against what is available.

    Not where ranks go to machines that are not known here.
    """
    if runs_elsewhere(config):
        return None
    has = f"{_gib(machine.available_bytes)} is available"
    if alone := rank_problem(config, spec, weight_bytes, machine.available_bytes, has):
        return alone
    parts = memory_needed(config, spec, weight_bytes)
    needed = sum(parts.values())
    if needed <= machine.available_bytes:
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


def shm_warning(config: ClusterConfig, machine: Machine) -> str | None:
    """Ray works without shared memory, only slower to start: requests and KV never pass it."""
    if config.cluster.runtime != "ray" or machine.shm_bytes >= SHM_BYTES:
        return None
    return (
        f"/dev/shm has {machine.shm_bytes // MIB} MiB free; Ray will use /tmp instead "
        "(in Docker: --shm-size=1g)"
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def total_bytes() -> int:
    """The machine's memory, or the control group's limit where that is less."""
    total = meminfo_bytes(Path("/proc/meminfo").read_text("utf-8"), "MemTotal")
    root = Path("/sys/fs/cgroup")
    for file in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        limit = file.read_text("utf-8").strip() if file.is_file() else "max"
        total = total if limit == "max" else min(total, int(limit))
    return total


def _available_bytes() -> int:
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
