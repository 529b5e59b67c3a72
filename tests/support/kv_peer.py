"""A KV transport in a process of its own, told what to do over a pipe. For spawned tests."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

import numpy as np

from core.errors import TransferError
from disagg.transport.base import Copy, MemoryRegion
from disagg.transport.mooncake import MooncakeTransport


class KvPeer:
    """``size`` registered bytes; each method is a command, and its result the answer."""

    def __init__(self, size: int, fill: int) -> None:
        self._memory = np.full(size, fill, np.uint8)
        self.base = int(self._memory.ctypes.data)
        self.transport = MooncakeTransport("127.0.0.1")
        self.transport.register([MemoryRegion(self.base, size)])

    def write(self, target: str, copies: list[tuple[int, int, int]]) -> str:
        """The error, or nothing."""
        try:
            self.transport.write(target, [Copy(*copy) for copy in copies])
        except TransferError as error:
            return str(error)
        return ""

    def total(self, start: int, stop: int) -> int:
        return int(self._memory[start:stop].sum())

    def fill(self, value: int) -> None:
        self._memory[:] = value

    def renew(self) -> str:
        return self.transport.renew()

    def freeze_at_first_byte(self) -> None:
        """Stop this process as soon as something lands."""
        while not self._memory[::4096].any():
            pass
        os.kill(os.getpid(), signal.SIGSTOP)


def serve(pipe: Connection, size: int, fill: int) -> None:
    """Say (address, base), then obey (command, arguments) until told to stop with None."""
    peer = KvPeer(size, fill)
    pipe.send((peer.transport.address, peer.base))
    while (order := pipe.recv()) is not None:
        command, arguments = order
        pipe.send(getattr(peer, command)(*arguments))
    peer.transport.close()
