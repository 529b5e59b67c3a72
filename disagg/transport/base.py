"""How KV bytes move between two ranks: the KVTransport Protocol and its registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from core.errors import EngineError
from core.registry import Entry, Registry

Int64Array = NDArray[np.int64]


class Copy(NamedTuple):
    """``length`` bytes from a local address to an address in the target's memory."""

    source: int
    target: int
    length: int


class MemoryRegion(NamedTuple):
    """A stretch of this process's memory that transfers may read from and write to."""

    address: int
    length: int  # bytes
    file: int = -1  # descriptor of the file it lies in, where others can map it: core.shared_memory
    offset: int = 0  # in that file


class KVTransport(Protocol):
    """One-sided writes from this rank into registered memory of another.

    An object serves either a Sender or a Receiver, not both: ``renew`` cuts off every peer.
    """

    @property
    def address(self) -> str:
        """Where peers write to; a new one after each ``renew``, never one used before."""
        ...

    @property
    def lost(self) -> bool:
        """Whether ``address`` has died by itself: only ``renew`` makes another. Cheap."""
        ...

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Open these regions. They must not overlap, and must outlive the transport."""
        ...

    def exported(self, addresses: Sequence[int]) -> tuple[int, ...]:
        """What peers call these registered addresses when they write to the present ``address``.

        Raises EngineError where one is not registered.
        """
        ...

    def write(self, target: str, copies: Sequence[Copy]) -> None:
        """Copy all, and return when the bytes are visible to the target. Any thread.

        A copy's source is an address here, its target one that the target has ``exported``.

        Raises TransferError when that is not certain. Some bytes may then have landed, and more
        may land later, read from the source at that time, until the target or this rank renews.
        Raises EngineError when a source is not registered here.
        """
        ...

    def renew(self) -> str:
        """The fence: replace the engine, open the same regions, return the new address.

        Afterwards nothing that was written to an old address lands here, and no earlier write
        of this rank reads its source any more. Waits for writes in progress in other threads, or
        fails them when they take long.
        """
        ...

    def forget(self, target: str) -> None:
        """The peer at ``target`` is there no more: let go of what is kept for it. Never blocks."""
        ...

    def close(self) -> None:
        """Stop; nothing lands and nothing is read afterwards."""
        ...


class RegionTable:
    """Registered regions, sorted; answers whether ranges lie inside them."""

    def __init__(self, regions: Sequence[MemoryRegion] = ()) -> None:
        ordered = sorted(regions)
        self.regions = tuple(ordered)
        self._starts = np.array([r.address for r in ordered], dtype=np.int64)
        self._ends = np.array([r.address + r.length for r in ordered], dtype=np.int64)
        assert all(r.address > 0 and r.length > 0 for r in ordered), regions
        assert bool((self._ends[:-1] <= self._starts[1:]).all()), "regions overlap"

    def holds(
        self, address: Sequence[int] | Int64Array, length: Sequence[int] | Int64Array
    ) -> bool:
        """Whether every range of ``length[i]`` bytes at ``address[i]`` lies inside one region."""
        if len(address) == 0:
            return True
        if not self.regions:
            return False
        first = np.asarray(address, dtype=np.int64)
        index = np.searchsorted(self._starts, first, side="right") - 1
        inside = (index >= 0) & (first + np.asarray(length, dtype=np.int64) <= self._ends[index])
        return bool(inside.all())

    def require_sources(self, copies: Sequence[Copy]) -> None:
        """Raise EngineError unless every source is registered: TCP would not mind, RDMA does."""
        self.require([c.source for c in copies], [c.length for c in copies])

    def require(
        self, address: Sequence[int] | Int64Array, length: Sequence[int] | Int64Array
    ) -> None:
        """Raise EngineError unless the table ``holds`` every range."""
        if not self.holds(address, length):
            raise EngineError("a KV write names memory that was never registered for transfers")


TRANSPORTS: Registry[KVTransport] = Registry(
    "KV transport",
    {
        "inproc": Entry("disagg.transport.inproc:InprocTransport"),
        "mooncake": Entry("disagg.transport.mooncake:MooncakeTransport", needs=("mooncake",)),
        "mooncake_inline": Entry(
            "disagg.transport.mooncake_inline:InlineMooncakeTransport", needs=("mooncake",)
        ),
    },
)
