"""Compile the kernels of this folder for this machine, once: ``python -m worker.kernels.build``.

The library lies in the cache, under a hash of its sources, the flags, the processor and torch's
version. The compiler is not part of the name, so a machine without one can use a cache that was
filled on its like.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from core.clock import RealClock
from core.env import cache_dir
from core.errors import PreflightError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
NAME = "antiphon_kernels.so"
COMPILERS = ("g++", "c++")
_SCRATCH = "tmp"  # begins the names of folders that builds work in
LISTED = 20  # lines of a compiler's complaint that are shown
TIMEOUT_S = 300.0
KEPT_S = 30 * 86400.0  # a library that nobody has asked for so long makes room
# contract=fast: products and sums become one instruction wherever the processor has it, which
# every instance of a loop must agree on
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wno-psabi",
    "-DAT_PARALLEL_OPENMP=1",
)


def library() -> Path:
    """The compiled library; compiles it (about ten seconds) where this machine has none yet.

    Raises PreflightError where there is no compiler, or it fails.
    """
    target = cache_dir() / "kernels" / _key() / NAME
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():  # else another rank has built it meanwhile
                _sweep(target.parent)
                _build(target)
    with suppress(OSError):  # a cache may be read-only
        os.utime(target)  # asked for: see _sweep
    return target


def _sweep(folder: Path) -> None:
    """Remove what interrupted builds left in ``folder``, and libraries that were long unused.

    Whoever has loaded one of those keeps it: a mapped file lives on without its name.
    """
    oldest = RealClock().epoch() - KEPT_S
    for other in folder.parent.iterdir():
        built = other / NAME
        with suppress(OSError):  # another process may be sweeping too
            if (built if built.exists() else other).stat().st_mtime < oldest:
                shutil.rmtree(other)
    for left in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)


def _build(target: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise PreflightError("no C++ compiler: apt-get install -y g++")
    logger.info("compiling the CPU kernels into %s", target)
    torch_root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target.parent) as scratch:
        folder = Path(scratch)
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(folder / f"{source.stem}.o") for source in sources]
        flags = [*FLAGS, _for_this_processor(), "-isystem", str(torch_root / "include")]
        with ThreadPoolExecutor() as pool:
            commands = (
                [compiler, *flags, "-c", str(source), "-o", to]
                for source, to in zip(sources, objects, strict=True)
            )
            list(pool.map(_run, commands))
        built = folder / NAME
        libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([compiler, "-shared", "-fopenmp", *objects, "-o", str(built), *libraries])
        built.replace(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(f"{command[0]} does not work: {error}") from error
    if done.returncode:
        complaint = "\n".join(done.stderr.splitlines()[:LISTED])
        raise PreflightError(f"{command[0]} cannot compile the CPU kernels:\n{complaint}")


def _for_this_processor() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _key() -> str:
    digest = hashlib.sha256()
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(" ".join((*FLAGS, _processor(), torch.__version__)).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The instructions this processor knows; they decide what "native" means."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    known = (line for line in lines if line.startswith(("flags", "Features")))
    return " ".join((platform.system(), platform.machine(), *sorted(next(known, "").split())))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Ranks of one machine start together: one compiles, the others wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file
        yield


def main() -> int:
    """Build; the exit status. A failure is logged."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        library()
    except PreflightError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
