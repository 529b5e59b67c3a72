"""Transport over the Mooncake Transfer Engine: TCP on any machine, RDMA on a cluster.

Facts that shaped it, each measured with version 0.3.13 over TCP:

* A batch beyond the queue of its peer fails; so batches are small.
* An error code does not mean stopped: blocks of a failed batch land later. Only the end of an
  engine makes sure. Unregistering its memory is not enough for a block that has begun.
* Ending an engine takes 0.7 to 5 s, and holds the interpreter lock all the while.
* An engine remembers what it learnt of a peer, and never reaches one that restarted on its old
  port; a new engine does, and each failed write ends in one. Without that memory
  (MC_DISABLE_METACACHE) every write asks the peer first, and hangs for minutes when it is frozen.
* A new engine may get a port that an old one had; a writer's stale address must never come true.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from core.env import set_default
from core.errors import PreflightError, TransferError
from disagg.transport.base import Copy, MemoryRegion, RegionTable

BATCH_BLOCKS = 1000  # the engine's own queue holds 1024 for each peer
PORT_TRIES = 16

DEFAULTS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TRANSFER_TIMEOUT": "5",  # seconds until a write to a mute peer fails; 30 by default
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_LOG_LEVEL": "ERROR",
}


class _Engine:
    """One TransferEngine with its registered memory, ended when the last write has left it."""

    def __init__(self, host: str, protocol: str, device: str) -> None:
        self._raw: Any = _engine_class()()  # opaque: an extension type without stubs
        code = self._raw.initialize(host, "P2PHANDSHAKE", protocol, device)
        if code != 0:
            raise TransferError(
                f"Mooncake could not start on {host} over {protocol} (code {code}): check that the "
                "address is this machine's, and that ports 15000 to 17000 are not all taken"
            )
        self.address = f"{host}:{self._raw.get_rpc_port()}"
        self._regions: list[MemoryRegion] = []
        self._writes = 0
        self._idle = threading.Condition()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for region in regions:
            code = self._raw.register_memory(region.address, region.length)
            if code != 0:
                raise TransferError(
                    f"Mooncake could not register {region.length} bytes (code {code})"
                )
            self._regions.append(region)

    def enter(self) -> None:
        """Count a write in, so that ``end`` waits for it."""
        with self._idle:
            self._writes += 1

    def leave(self) -> None:
        with self._idle:
            self._writes -= 1
            self._idle.notify_all()

    def write(self, target: str, batch: Sequence[Copy]) -> int:
        """One batch; the engine's return code, 0 when all is visible to the target."""
        sources, targets, lengths = (list(column) for column in zip(*batch, strict=True))
        code: int = self._raw.batch_transfer_sync_write(target, sources, targets, lengths)
        return code

    def end(self) -> None:
        """Let nothing more land or be read. Returns when that is so."""
        with self._idle:
            self._idle.wait_for(lambda: self._writes == 0)
        if self._raw is None:
            return
        for region in self._regions:
            self._raw.unregister_memory(region.address)
        self._raw = None  # the last reference: ends the engine's threads and connections


class MooncakeTransport:
    """A KVTransport over Mooncake. ``protocol`` is "tcp", or "rdma" with its ``device``.

    Raises PreflightError when the library cannot be loaded, TransferError when it cannot start.
    """

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        self._host = host
        self._protocol = protocol
        self._device = device
        self._table = RegionTable()
        self._used: set[str] = set()
        self._lock = threading.Lock()  # guards _engine against a write that is about to enter
        self._engine = self._fresh_engine()

    @property
    def address(self) -> str:
        return self._engine.address

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._table = RegionTable((*self._table.regions, *regions))
        self._engine.register(regions)

    def write(self, target: str, copies: Sequence[Copy]) -> None:
        wanted = [copy for copy in copies if copy.length]  # the engine refuses empty blocks
        self._table.require_sources(wanted)
        with self._lock:
            engine = self._engine
            engine.enter()
        try:
            for start in range(0, len(wanted), BATCH_BLOCKS):
                code = engine.write(target, wanted[start : start + BATCH_BLOCKS])
                if code != 0:
                    raise TransferError(f"Mooncake write to {target} failed (code {code})")
        finally:
            engine.leave()

    def renew(self) -> str:
        fresh = self._fresh_engine()
        fresh.register(self._table.regions)
        with self._lock:
            old, self._engine = self._engine, fresh
        old.end()
        return fresh.address

    def close(self) -> None:
        self._engine.end()

    def _fresh_engine(self) -> _Engine:
        """An engine at an address that this transport never had."""
        repeated: list[
            _Engine
        ] = []  # kept until a new address is found, so that theirs are not drawn again
        for _ in range(PORT_TRIES):
            engine = _Engine(self._host, self._protocol, self._device)
            if engine.address not in self._used:
                self._used.add(engine.address)
                for other in repeated:
                    other.end()
                return engine
            repeated.append(engine)
        raise TransferError(f"Mooncake found no unused port on {self._host}")


def _engine_class() -> Any:  # opaque: an extension type without stubs
    """The TransferEngine class; its defaults have to be set before it is loaded."""
    for name, value in DEFAULTS.items():
        set_default(name, value)
    try:
        return import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        fix = "pip install mooncake-transfer-engine-non-cuda"
        if "libibverbs" in str(error):
            fix = "apt-get install -y libibverbs1"
        elif ".so" in str(error):
            fix = "apt-get install -y libibverbs1 libnuma1 libcurl4"
        raise PreflightError(f"Mooncake cannot be loaded ({error}): {fix}") from error
