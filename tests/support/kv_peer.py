"""A KV transport in a process of its own, in a rank's stead, told what to do over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from core.errors import TransferError
from core.shared_memory import SharedMemory
from disagg.transport.base import TRANSPORTS, Copy, KVTransport, MemoryRegion


class KvEnd:
    """A transport with ``size`` registered bytes."""

    def __init__(self, name: str, size: int, fill: int) -> None:
        self._shared = SharedMemory(size)
        self.memory = np.frombuffer(self._shared.buffer, np.uint8)
        self.memory[:] = fill
        self.base = self._shared.address
        self.transport: KVTransport = TRANSPORTS.load(name)("127.0.0.1")
        self.transport.register([MemoryRegion(self.base, size, self._shared.file)])

    @property
    def where(self) -> tuple[str, int]:
        """The address to write to, and what the beginning of the memory is called there."""
        (base,) = self.transport.exported([self.base])
        return self.transport.address, base

    @property
    def pid(self) -> int:
        """Of the process that moves the bytes."""
        return getattr(self.transport, "pid", os.getpid())


class KvPeer(KvEnd):
    """Each method is a command, and its result the answer."""

    def write(self, target: str, copies: list[tuple[int, int, int]]) -> str:
        """Copies from offsets here; the error, or nothing."""
        try:
            self.transport.write(target, [Copy(self.base + at, to, n) for at, to, n in copies])
        except TransferError as error:
            return str(error)
        return ""

    def total(self, start: int, stop: int) -> int:
        return int(self.memory[start:stop].sum())

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def renew(self) -> tuple[str, int]:
        self.transport.renew()
        return self.where

    def freeze_at_first_byte(self) -> None:
        """Stop what moves the bytes as soon as something lands."""
        while not self.memory[::4096].any():
            pass
        os.kill(self.pid, signal.SIGSTOP)


def serve(pipe: Connection, name: str, size: int, fill: int) -> None:
    """Say (where, pid), then obey (command, arguments) until told to stop with None."""
    peer = KvPeer(name, size, fill)
    pipe.send((peer.where, peer.pid))
    while (order := pipe.recv()) is not None:
        command, arguments = order
        pipe.send(getattr(peer, command)(*arguments))
    peer.transport.close()


class PeerProcess:
    """Runs a KvPeer. ``mover`` is the pid that moves its bytes: its own, or its child's."""

    def __init__(self, name: str, size: int, fill: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, size, fill))
        self.process.start()
        theirs.close()
        (self.address, self.base), self.mover = self.hear()

    def hear(self) -> object:
        assert self._pipe.poll(30), "the peer does not answer"
        return self._pipe.recv()

    def tell(self, command: str, *arguments: object) -> None:
        self._pipe.send((command, arguments))

    def ask(self, command: str, *arguments: object) -> object:
        self.tell(command, *arguments)
        return self.hear()

    def end(self) -> None:
        if self.process.is_alive():
            with suppress(ProcessLookupError):  # another may have taken over
                os.kill(self.mover, signal.SIGCONT)
            self._pipe.send(None)
        self.process.join(30)
        self.process.close()
        self._pipe.close()
