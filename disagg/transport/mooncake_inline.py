"""Transport over Mooncake with its engine in this process: for memory that no other can map.

A GPU's memory is such. Replacing the engine, the fence, takes 0.7 to 5 s here, and the whole
process stands still meanwhile; see disagg/transport/mooncake.py for the one to use on a CPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from core.errors import TransferError
from disagg.transport.base import Copy, MemoryRegion, RegionTable
from disagg.transport.mooncake_engine import AVOIDED, BATCH_BLOCKS, Engine, fresh_engine


class InlineMooncakeTransport:
    """A KVTransport over Mooncake. ``protocol`` is "tcp", or "rdma" with its ``device``.

    Raises PreflightError when the library cannot be loaded, TransferError when it cannot start.
    """

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        self._host = host
        self._protocol = protocol
        self._device = device
        self._table = RegionTable()
        self._used: deque[str] = deque(maxlen=AVOIDED)
        self._lock = threading.Lock()  # guards _engine against a write that is about to enter
        self._engine = self._fresh_engine()

    @property
    def address(self) -> str:
        return self._engine.address

    @property
    def lost(self) -> bool:
        return False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._table = RegionTable((*self._table.regions, *regions))
        for region in regions:
            self._engine.register(region.address, region.length)

    def exported(self, addresses: Sequence[int]) -> tuple[int, ...]:
        self._table.require(addresses, [1] * len(addresses))
        return tuple(addresses)

    def write(self, target: str, copies: Sequence[Copy]) -> None:
        wanted = [copy for copy in copies if copy.length]  # the engine refuses empty blocks
        self._table.require_sources(wanted)
        with self._lock:
            engine = self._engine
            engine.underway.enter()
        try:
            for start in range(0, len(wanted), BATCH_BLOCKS):
                batch = wanted[start : start + BATCH_BLOCKS]
                code = engine.write(target, *map(list, zip(*batch, strict=True)))
                if code != 0:
                    raise TransferError(f"Mooncake write to {target} failed (code {code})")
        finally:
            engine.underway.leave()

    def forget(self, target: str) -> None:
        """Its connections stay until the engine is replaced, which would cost too much here."""

    def renew(self) -> str:
        fresh = self._fresh_engine()
        for region in self._table.regions:
            fresh.register(region.address, region.length)
        with self._lock:
            old, self._engine = self._engine, fresh
        old.end()
        return fresh.address

    def close(self) -> None:
        self._engine.end()

    def _fresh_engine(self) -> Engine:
        """An engine at an address that this transport has not had lately."""
        engine = fresh_engine(self._host, self._protocol, self._device, self._used)
        self._used.append(engine.address)
        return engine
