"""A rank whose KV writes can be held back or failed: ``python -m tests.chaos.rank CONTROL_FILE``.

Everything else is the product's own process (cluster/rank_process.py). The control file holds one
word; a missing file is calm. Beside it a file ``port_file`` may say on which port the rank listens.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path

from cluster.actors import WorkerActor
from cluster.rank_process import main
from core.config import RankSpec
from core.errors import TransferError
from core.rpc.server import RankServer
from disagg.transport.base import Copy, KVTransport, MemoryRegion

POLL_S = 0.005
LATE_S = 0.4  # when the rest of a failed write tries to land


class Fault(StrEnum):
    """What becomes of every write while the control file says so."""

    HOLD = "hold"  # waits until the file says something else
    FAIL = "fail"  # raises; nothing lands
    LATE = "late"  # raises; half has landed, the rest comes later if nobody renewed meanwhile


class FaultyTransport:
    """A KVTransport around the real one."""

    def __init__(self, inner: KVTransport, control: Path) -> None:
        self._inner = inner
        self._control = control
        self._pause = threading.Event()
        self._life = 0  # renewals so far: what is late of an earlier life never comes
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def lost(self) -> bool:
        return self._inner.lost

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._inner.register(regions)

    def exported(self, addresses: Sequence[int]) -> tuple[int, ...]:
        return self._inner.exported(addresses)

    def write(self, target: str, copies: Sequence[Copy]) -> None:
        while (fault := self._fault()) == Fault.HOLD:
            self._pause.wait(POLL_S)
        if fault == Fault.FAIL:
            raise TransferError("failed as asked")
        if fault == Fault.LATE:
            half = len(copies) // 2
            self._inner.write(target, copies[:half])
            late = partial(self._come_late, self._life, target, copies[half:])
            threading.Timer(LATE_S, late).start()
            raise TransferError("failed as asked, half way")
        self._inner.write(target, copies)

    def forget(self, target: str) -> None:
        self._inner.forget(target)

    def renew(self) -> str:
        with self._lock:
            self._life += 1
            return self._inner.renew()

    def close(self) -> None:
        self._inner.close()

    def _come_late(self, life: int, target: str, copies: Sequence[Copy]) -> None:
        with self._lock:
            if life == self._life:
                try:
                    self._inner.write(target, copies)
                except TransferError:
                    return  # the target has renewed: nobody minds

    def _fault(self) -> str:
        return _word(self._control)


def port_file(control: Path) -> Path:
    """Where the port stands on which a rank comes back; none: any free one."""
    return control.with_suffix(".port")


def _word(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except FileNotFoundError:
        return ""


def _listen_where_asked(file: Path) -> None:
    bind = RankServer.bind

    def where_asked(server: RankServer, host: str = "127.0.0.1", port: int = 0) -> str:
        return bind(server, host, int(_word(file) or port))

    RankServer.bind = where_asked  # type: ignore[method-assign,assignment]


def faulty_rank(control: Path, spec: bytes) -> WorkerActor:
    """What cluster.rank_process runs."""

    def opened(rank: RankSpec) -> KVTransport:
        from disagg.transport.mooncake import MooncakeTransport

        inner = MooncakeTransport(rank.host, rank.disagg.protocol, rank.disagg.device)
        return FaultyTransport(inner, control)

    _listen_where_asked(port_file(control))
    return WorkerActor(spec, transport=opened)


if __name__ == "__main__":
    main(partial(faulty_rank, Path(sys.argv[1])))
