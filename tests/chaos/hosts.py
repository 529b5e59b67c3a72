"""Each rank on a host of its own: a network namespace whose link can be cut. Needs root and `ip`.

    head (we, the routers)   prefill-0 ... decode-1
            └────────── bridge, in a namespace of its own ──────────┘

Namespaces, links and addresses are named after our process, so several labs can run side by side.
Without root every rank is on 127.0.0.1, and ``problem`` says why nothing can be cut.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

HEAD = "head"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Hosts:
    """Where the ranks run, by name. ``lab`` is empty on one host."""

    lab: str = ""
    names: tuple[str, ...] = ()
    problem: str = ""

    @property
    def can_cut(self) -> bool:
        return bool(self.lab)

    def address(self, name: str) -> str:
        return f"10.213.77.{1 + self._index(name)}" if self.lab else LOOPBACK

    def within(self, name: str, command: Sequence[str]) -> tuple[str, ...]:
        """The command that runs ``command`` on a host."""
        if not self.lab:
            return tuple(command)
        return ("ip", "netns", "exec", f"{self.lab}-{name}", *command)

    def cut(self, name: str) -> None:
        self._link(name, "down")

    def heal(self, name: str) -> None:
        self._link(name, "up")

    def _link(self, name: str, to: str) -> None:
        assert self.lab, self.problem
        _ip("-n", f"{self.lab}-switch", "link", "set", f"port{self._index(name)}", to)

    def _index(self, name: str) -> int:
        return self.names.index(name)


def problem() -> str:
    """Why there can be no namespaces here, or empty."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip is not installed (apt-get install -y iproute2)"
    probe = f"antiphon{os.getpid()}-probe"
    done = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"ip netns add failed: {done.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


@contextmanager
def laid_out(names: Sequence[str]) -> Iterator[Hosts]:
    """Hosts with these names, and ``head``; what was made is removed at the end."""
    if words := problem():
        yield Hosts(problem=words)
        return
    hosts = Hosts(f"antiphon{os.getpid()}", (HEAD, *names))
    switch = f"{hosts.lab}-switch"
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for index, name in enumerate(hosts.names):
            host, port = f"{hosts.lab}-{name}", f"port{index}"
            _ip("netns", "add", host)
            _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "eth0", "netns", host)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", host, "addr", "add", f"{hosts.address(name)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name in (*hosts.names, "switch"):
            host = f"{hosts.lab}-{name}"
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def on_head(hosts: Hosts, module: str, words: Sequence[str]) -> int:
    """Run a module as a process on the head's host; its exit code."""
    command = hosts.within(HEAD, (sys.executable, "-m", module, *words))
    return subprocess.run(command, check=False).returncode


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
