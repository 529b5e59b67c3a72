"""Transport over the Mooncake Transfer Engine, in a small process beside this one.

The process (transfer_process.py) owns the engine and maps the memory of this one that transfers
may use. The fence is its end: SIGKILL, and another takes over that has been waiting. That takes
milliseconds, holds no lock of this interpreter, and leaves nothing behind; an engine in this
process (mooncake_inline.py) takes seconds, in which the whole rank stands still.

All processes are started and ended by one thread, the keeper, which lives as long as the transport:
the kernel kills a child together with the thread that started it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

from core.errors import EngineError, PreflightError, TransferError
from disagg.transport.base import Copy, Int64Array, MemoryRegion, RegionTable
from disagg.transport.mooncake_engine import AVOIDED, BATCH_BLOCKS
from disagg.transport.transfer_child import SharedPart, TransferChild
from disagg.transport.transfer_messages import Start

log = logging.getLogger(__name__)

DRAIN_S = 1.0  # for writes under way when their process is replaced; to mute peers they take longer


class MooncakeTransport:
    """A KVTransport over Mooncake. ``protocol`` is "tcp", or "rdma" with its ``device``.

    Its regions must lie in shared memory. Raises PreflightError when the library cannot be loaded,
    TransferError when it cannot start.
    """

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        self._how = (host, protocol, device)
        self._table = RegionTable()
        self._parts: list[SharedPart] = []  # in the order of registration
        self._starts: list[int] = []  # of each part, in this process
        self._used: deque[str] = deque(maxlen=AVOIDED)
        self._closed = False
        self._lock = threading.Lock()  # guards _child against a write that is about to enter
        self._spare: TransferChild | None = None
        self._keeper = ThreadPoolExecutor(1, "kv-keeper")
        try:
            self._child = self._keeper.submit(self._start).result()
        except BaseException:
            self._keeper.shutdown()
            raise

    @property
    def address(self) -> str:
        return self._child.address

    @property
    def lost(self) -> bool:
        return self._child.lost and not self._closed

    @property
    def pid(self) -> int:
        """Of the process that transfers at present."""
        return self._child.pid

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        if any(region.file < 0 for region in regions):
            raise EngineError("Mooncake in a process of its own can only reach shared memory")
        self._table = RegionTable((*self._table.regions, *regions))
        for region in regions:
            self._parts.append(SharedPart(os.dup(region.file), region.offset, region.length))
            self._starts.append(region.address)
        self._keeper.submit(self._catch_up, self._child).result()
        self._keeper.submit(self._prepare)

    def exported(self, addresses: Sequence[int]) -> tuple[int, ...]:
        numbers = np.asarray(addresses, dtype=np.int64)
        self._table.require(numbers, np.ones_like(numbers))
        return tuple((numbers + self._shifts(self._child, numbers)).tolist())

    def write(self, target: str, copies: Sequence[Copy]) -> None:
        numbers = np.fromiter(chain.from_iterable(copies), np.int64, 3 * len(copies)).reshape(-1, 3)
        numbers = numbers[numbers[:, 2] > 0]  # the engine refuses empty blocks
        self._table.require(numbers[:, 0], numbers[:, 2])
        child = self._enter()
        try:
            numbers[:, 0] += self._shifts(child, numbers[:, 0])
            for start in range(0, len(numbers), BATCH_BLOCKS):
                child.write(target, numbers[start : start + BATCH_BLOCKS].T.tobytes())
        finally:
            child.underway.leave()

    def forget(self, target: str) -> None:
        """Its connections end with the process that has them; another takes over, beside this."""
        child = self._child
        if target in child.targets and not self._closed:
            self._keeper.submit(self._replace, child)

    def renew(self) -> str:
        if self._closed:
            raise TransferError("the transport is closed")
        return self._keeper.submit(self._replace, None).result()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._keeper.submit(self._end_all).result()
            self._keeper.shutdown()

    def _enter(self) -> TransferChild:
        """The present process, with a write counted in; a new one where it was found dead."""
        if (child := self._child).lost and not self._closed:
            self._keeper.submit(self._replace, child).result()
        with self._lock:
            child = self._child
            child.underway.enter()
        return child

    def _shifts(self, child: TransferChild, addresses: Int64Array) -> Int64Array:
        """What has to be added to each of these registered addresses to name it in ``child``."""
        starts, bases = np.array(self._starts, np.int64), np.array(child.bases, np.int64)
        order = np.argsort(starts)
        index = order[np.searchsorted(starts[order], addresses, side="right") - 1]
        shifts: Int64Array = bases[index] - starts[index]
        return shifts

    # --- on the keeper's thread -----------------------------------------------------------------

    def _start(self) -> TransferChild:
        host, protocol, device = self._how
        start = Start(host=host, protocol=protocol, device=device, used=tuple(self._used))
        child = TransferChild(start)
        self._used.append(child.address)
        try:
            self._catch_up(child)
        except TransferError:
            child.end()
            raise
        return child

    def _catch_up(self, child: TransferChild) -> None:
        """Open what it does not have yet."""
        for part in self._parts[len(child.bases) :]:
            child.open(part)

    def _prepare(self) -> None:
        """Start the next process before it is needed."""
        if self._closed or self._spare is not None:
            return
        try:
            self._spare = self._start()
        except (PreflightError, TransferError) as error:  # told when it is needed and fails again
            log.warning("no transfer process could be started in advance: %s", error)

    def _take_spare(self) -> TransferChild | None:
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        try:
            self._catch_up(spare)
            spare.check()
        except TransferError:
            spare.end()
            return None
        return spare

    def _replace(self, only: TransferChild | None) -> str:
        """The fence. With ``only``, nothing where that process is not the present one any more."""
        if self._closed or (only is not None and only is not self._child):
            return self._child.address
        fresh = self._take_spare() or self._start()
        with self._lock:
            old, self._child = self._child, fresh
        if old.lost:
            log.warning("the transfer process %d has ended by itself", old.pid)
        old.end(DRAIN_S)
        self._keeper.submit(self._prepare)
        return fresh.address

    def _end_all(self) -> None:
        for child in (self._child, self._spare):
            if child is not None:
                child.end()
        for part in self._parts:
            os.close(part.file)
