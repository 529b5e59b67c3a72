"""Transport inside one process: a memory copy, with faults and late writes for tests.

All transports of one process share a Hub, which plays the network. A write that the hub's
``fault`` policy fails lands its first half, and keeps the rest *late*: it lands when the test
lets it, with what the source holds by then, unless the target was renewed meanwhile.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from core.errors import TransferError
from disagg.transport.base import Copy, MemoryRegion, RegionTable


class Fault(Enum):
    """What becomes of one write."""

    NONE = "none"
    FAIL = "fail"  # raises; nothing lands
    LATE = "late"  # raises; half has landed, the rest lands later


@dataclass(slots=True)
class LateWrite:
    """What is left of a failed write."""

    writer: InprocTransport
    target: str
    copies: list[Copy]
    snapshot: list[bytes] | None = None  # what had left the writer when it renewed


def _no_fault(_target: str, _copies: Sequence[Copy]) -> Fault:
    return Fault.NONE


def _unobserved(_copy: Copy) -> None:
    return None


@dataclass(slots=True)
class Hub:
    """The network between the transports of one process.

    ``on_read`` and ``on_land`` see every copy's source being read and target being written.
    """

    fault: Callable[[str, Sequence[Copy]], Fault] = _no_fault
    on_read: Callable[[Copy], None] = _unobserved
    on_land: Callable[[Copy], None] = _unobserved
    late: list[LateWrite] = field(default_factory=list)
    _live: dict[str, InprocTransport] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def join(self, transport: InprocTransport, old: str = "") -> str:
        """Give ``transport`` a fresh address and forget its old one."""
        with self._lock:
            self.leave(transport, old)
            address = f"inproc:{next(self._numbers)}"
            self._live[address] = transport
            return address

    def leave(self, transport: InprocTransport, address: str) -> None:
        """Nothing sent to ``address`` lands from now on, and ``transport`` reads no source."""
        with self._lock:
            self._live.pop(address, None)
            for write in self.late:
                if write.writer is transport and write.snapshot is None:
                    write.snapshot = [self._read(copy) for copy in write.copies]

    def carry(self, writer: InprocTransport, target: str, copies: Sequence[Copy]) -> None:
        """One write, under the fault policy. Raises TransferError."""
        with self._lock:
            receiver = self._live.get(target)
            if receiver is None:
                raise TransferError(f"no peer at {target}")
            if not receiver.accepts(copies):
                raise TransferError(f"{target} has not registered the written memory")
            fault = self.fault(target, copies)
            if fault is Fault.FAIL:
                raise TransferError(f"write to {target} failed")
            landing = len(copies) if fault is Fault.NONE else len(copies) // 2
            for copy in copies[:landing]:
                self._land(copy, self._read(copy))
            if fault is Fault.LATE:
                self.late.append(LateWrite(writer, target, list(copies[landing:])))
                raise TransferError(f"write to {target} timed out")

    def release_late(self, write: LateWrite) -> bool:
        """Let what is left of ``write`` arrive; whether it landed."""
        with self._lock:
            self.late.remove(write)
            if write.target not in self._live:
                return False
            data = write.snapshot or [self._read(copy) for copy in write.copies]
            for copy, piece in zip(write.copies, data, strict=True):
                self._land(copy, piece)
            return True

    def _read(self, copy: Copy) -> bytes:
        self.on_read(copy)
        return ctypes.string_at(copy.source, copy.length)

    def _land(self, copy: Copy, data: bytes) -> None:
        self.on_land(copy)
        ctypes.memmove(copy.target, data, copy.length)


class InprocTransport:
    """A KVTransport whose peers live in the same process."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._table = RegionTable()
        self._address = hub.join(self)

    @property
    def address(self) -> str:
        return self._address

    @property
    def lost(self) -> bool:
        return False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._table = RegionTable((*self._table.regions, *regions))

    def exported(self, addresses: Sequence[int]) -> tuple[int, ...]:
        self._table.require(addresses, [1] * len(addresses))
        return tuple(addresses)

    def accepts(self, copies: Sequence[Copy]) -> bool:
        """Whether every target lies in this transport's registered memory."""
        return self._table.holds([c.target for c in copies], [c.length for c in copies])

    def write(self, target: str, copies: Sequence[Copy]) -> None:
        if copies:
            self._table.require_sources(copies)
            self._hub.carry(self, target, copies)

    def forget(self, target: str) -> None:
        """Nothing is kept."""

    def renew(self) -> str:
        self._address = self._hub.join(self, self._address)
        return self._address

    def close(self) -> None:
        self._hub.leave(self, self._address)
