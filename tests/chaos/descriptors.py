"""File descriptors of a process, as the kernel lists them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CLOSE_WAIT = "08"  # state of a TCP connection in /proc/net/tcp: the peer has closed it, we have not


def count(pid: int) -> int:
    """How many are open; 0 where the process has just ended."""
    return sum(1 for _ in _targets(pid))


def half_closed(pid: int) -> list[str]:
    """Far ends, in the kernel's words, of connections that they have closed and we keep."""
    mine = set(_targets(pid))
    return [far for inode, far in _waiting(pid) if f"socket:[{inode}]" in mine]


def _waiting(pid: int) -> Iterator[tuple[str, str]]:
    """Inodes and far ends of half closed connections in the process's network namespace."""
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            lines = Path(f"/proc/{pid}/net/{name}").read_text("utf-8").splitlines()[1:]
            rows = map(str.split, lines)
            yield from ((row[9], row[2]) for row in rows if row[3] == CLOSE_WAIT)


def _targets(pid: int) -> Iterator[str]:
    """What each descriptor of a process stands for."""
    with suppress(FileNotFoundError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                yield str(link.readlink())
