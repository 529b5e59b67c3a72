"""A KV transport in a process of its own, told what to do over a pipe. For spawned tests."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

import numpy as np

from core.errors import TransferError
from disagg.transport.base import Copy, MemoryRegion
from disagg.transport.mooncake import MooncakeTransport


def serve(pipe: Connection, size: int, fill: int) -> None:
    """Register ``size`` bytes, say (address, base), then obey until told to stop."""
    memory = np.full(size, fill, np.uint8)
    transport = MooncakeTransport("127.0.0.1")
    base = int(memory.ctypes.data)
    transport.register([MemoryRegion(base, size)])
    pipe.send((transport.address, base))
    while True:
        match pipe.recv():
            case ("write", target, copies):
                try:
                    transport.write(target, [Copy(*copy) for copy in copies])
                except TransferError as error:
                    pipe.send(str(error))
                else:
                    pipe.send("")
            case ("sum", start, stop):
                pipe.send(int(memory[start:stop].sum()))
            case ("fill", value):
                memory[:] = value
                pipe.send(None)
            case ("freeze at first byte",):
                while not memory[::4096].any():
                    pass
                os.kill(os.getpid(), signal.SIGSTOP)
            case ("renew",):
                pipe.send(transport.renew())
            case ("stop",):
                transport.close()
                return
