"""Each rank on a host of its own: a network namespace whose link can be cut. Needs root and `ip`.

A link can also be cut in one direction, and can lose packets where the kernel has netem or `nft` is
installed.

    head (we, the routers)   prefill-0 ... decode-1
            └────────── bridge, in a namespace of its own ──────────┘

Namespaces, links and addresses are named after our process, so several labs can run side by side.
Without root every rank is on 127.0.0.1, and ``problem`` says why nothing can be cut.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

HEAD = "head"
LOOPBACK = "127.0.0.1"
NOBODY = "02:00:00:00:00:01"  # a hardware address that no host has: what is sent there is lost
LOSS_PERCENT = 10  # of the packets of a lossy link, in each direction
DELAY_MS = 20  # of one, where netem is there
NFT_CHAIN = (
    "add table bridge chaos; add chain bridge chaos lossy { type filter hook forward priority 0; }"
)


@dataclass(frozen=True)
class Hosts:
    """Where the ranks run, by name. ``lab`` is empty on one host."""

    lab: str = ""
    names: tuple[str, ...] = ()
    problem: str = ""  # why there is but one host
    loss: str = ""  # what loses packets: netem or nft
    loss_problem: str = ""  # why nothing can

    @classmethod
    def parse(cls, words: str) -> Hosts:
        """What ``words`` of another process said."""
        fields = json.loads(words)
        return cls(**fields | {"names": tuple(fields["names"])})

    def words(self) -> str:
        """For ``parse``."""
        return json.dumps(asdict(self))

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

    def deafen(self, source: str, target: str) -> None:
        """Lose every packet from one host to another, silently; none of the other direction."""
        words = (self.address(target), "lladdr", NOBODY, "nud", "permanent", "dev", "eth0")
        _ip("-n", f"{self.lab}-{source}", "neigh", "replace", *words)

    def undeafen(self, source: str, target: str) -> None:
        _ip("-n", f"{self.lab}-{source}", "neigh", "del", self.address(target), "dev", "eth0")

    def wear(self, name: str) -> None:
        """Lose some packets of a host's link, in both directions."""
        port = f"port{self._index(name)}"
        if self.loss == "nft":
            some = f"numgen random mod 100 < {LOSS_PERCENT} drop"
            _run(*self._nft(f"{NFT_CHAIN}; add rule bridge chaos lossy iifname {port} {some}"
                            f"; add rule bridge chaos lossy oifname {port} {some}"))  # fmt: skip
            return
        for where, link in self._ends(name):
            words = ("root", "netem", "loss", f"{LOSS_PERCENT}%", "delay", f"{DELAY_MS}ms")
            _run("tc", "-n", where, "qdisc", "replace", "dev", link, *words)

    def mend(self, name: str) -> None:
        """Undo ``wear``."""
        if self.loss == "nft":
            _run(*self._nft("delete table bridge chaos"))
            return
        for where, link in self._ends(name):
            _run("tc", "-n", where, "qdisc", "del", "dev", link, "root")

    def _nft(self, words: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", f"{self.lab}-switch", "nft", words)

    def _ends(self, name: str) -> tuple[tuple[str, str], ...]:
        """Both ends of a host's link: namespace and device."""
        return (
            (f"{self.lab}-switch", f"port{self._index(name)}"),
            (f"{self.lab}-{name}", "eth0"),
        )

    def with_loss(self) -> Hosts:
        """The same, knowing what can lose packets here."""
        where = f"{self.lab}-switch"
        netem = ("tc", "-n", where, "qdisc", "replace", "dev", "lo", "root", "netem", "loss", "1%")
        if shutil.which("tc") and not _fails(*netem):
            return replace(self, loss="netem")
        if shutil.which("nft") is None:
            words = "the kernel has no netem, and nft is not installed (apt-get install nftables)"
            return replace(self, loss_problem=words)
        rule = "add rule bridge chaos lossy numgen random mod 100 < 0 drop"
        if words := _fails(*self._nft(f"{NFT_CHAIN}; {rule}; delete table bridge chaos")):
            return replace(self, loss_problem=f"the kernel has no netem, and nft failed: {words}")
        return replace(self, loss="nft")

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
        yield hosts.with_loss()
    finally:
        for name in (*hosts.names, "switch"):
            host = f"{hosts.lab}-{name}"
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def on_head(hosts: Hosts, module: str, words: Sequence[str]) -> int:
    """Run a module as a process on the head's host; its exit code."""
    command = hosts.within(HEAD, (sys.executable, "-m", module, *words))
    return subprocess.run(command, check=False).returncode


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    problem = _fails(*words)
    assert not problem, f"{' '.join(words)}: {problem}"


def _fails(*words: str) -> str:
    """What a command says that fails; empty where it does not."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
