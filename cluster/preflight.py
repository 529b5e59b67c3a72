"""Check the machine before anything starts: packages, libraries, port, memory.

Every check is a function that returns the problem as one line that names the fix, or None. What
the checks need to know is read into ``Machine`` first, so that the rules run on any machine.
"""

from __future__ import annotations

import ctypes
import errno
import shutil
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster import model_store
from cluster.memory import MIB, available_bytes, memory_problem
from core.config import ClusterConfig
from core.errors import OperatorError, PreflightError
from core.registry import Registry
from core.tracing import tracer as tracing
from router.keys import read_keys
from router.policy.base import POLICIES
from router.text.defaults import sampling_defaults
from router.text.tokenizer import TOKENIZERS
from router.tls import read_tls
from worker.architectures import read_spec
from worker.checkpoint import weight_bytes

RDMA_DEVICES = Path("/sys/class/infiniband")
SHM_BYTES = 256 * MIB  # below this Ray keeps its object store in /tmp

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
    rdma_devices: frozenset[str] = frozenset()


def read_machine() -> Machine:
    """Look at this machine. Starts nothing and imports no heavy package."""
    modules = {module for extra in EXTRAS.values() for module in extra}
    shm = Path("/dev/shm")
    return Machine(
        available_bytes=available_bytes(),
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        absent=frozenset(module for module in modules if find_spec(module) is None),
        has_ibverbs=_loads("libibverbs.so.1"),
        rdma_devices=frozenset(path.name for path in RDMA_DEVICES.glob("*")),
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
    sampling_defaults(config.router, folder)
    found = (
        packages_problem(config, machine),
        tracing.problem(config.tracing),
        backend_problem(POLICIES, config.router.policy),
        backend_problem(TOKENIZERS, config.router.tokenizer),
        ibverbs_problem(config, machine),
        rdma_problem(config, machine),
        *port_problems(config),
        memory_problem(config, spec, weight_bytes(folder), machine.available_bytes),
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


def rdma_problem(config: ClusterConfig, machine: Machine) -> str | None:
    """A device that this machine lacks, where ranks run on this machine alone."""
    alone = config.cluster.runtime != "ray" or config.cluster.address == "local"
    if config.disagg.protocol != "rdma" or not _uses_mooncake(config) or not alone:
        return None
    wanted = {name.strip() for name in config.disagg.device.split(",") if name.strip()}
    has = ", ".join(sorted(machine.rdma_devices)) or "none"
    if unknown := sorted(wanted - machine.rdma_devices):
        return f"disagg.device: no RDMA device {', '.join(unknown)} here; this machine has {has}"
    if not machine.rdma_devices:
        return "disagg.protocol=rdma: this machine has no RDMA device; take disagg.protocol=tcp"
    return None


def _uses_mooncake(config: ClusterConfig) -> bool:
    return config.unified is None and config.disagg.transport.startswith("mooncake")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# --- the ports ----------------------------------------------------------------------------------


def port_problems(config: ClusterConfig) -> list[str]:
    """What keeps the router from listening, a line for each of its ports."""
    found = (port_problem(config.router.host, config.router.port), grpc_port_problem(config))
    return [problem for problem in found if problem is not None]


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


# --- shared memory ------------------------------------------------------------------------------


def shm_warning(config: ClusterConfig, machine: Machine) -> str | None:
    """Ray works without shared memory, only slower to start: requests and KV never pass it."""
    if config.cluster.runtime != "ray" or machine.shm_bytes >= SHM_BYTES:
        return None
    return (
        f"/dev/shm has {machine.shm_bytes // MIB} MiB free; Ray will use /tmp instead "
        "(in Docker: --shm-size=1g)"
    )
