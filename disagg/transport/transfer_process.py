"""The transfer process of a rank: ``python -m disagg.transport.transfer_process``, see `mooncake`.

It owns one Mooncake engine and maps the rank's KV pool, and has no state that would have to be
saved: the rank ends it with SIGKILL. It ends by itself with its rank, however that went: the kernel
kills it (PR_SET_PDEATHSIG), and the control socket ends. Numpy and torch are not imported.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import msgspec

from core.env import assign
from core.errors import OperatorError, TransferError
from core.shared_memory import map_file
from disagg.transport.mooncake_engine import Engine, fresh_engine
from disagg.transport.transfer_messages import (
    FRAME_BYTES,
    Answer,
    Check,
    Failed,
    Open,
    Opened,
    Order,
    Ready,
    Start,
    Write,
    Written,
)

PR_SET_PDEATHSIG = 1


def main(words: Sequence[str]) -> None:
    """``words`` are the rank's pid, and the descriptors of the control socket and each lane."""
    parent, control, *lanes = map(int, words)
    _end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to a group, they are for the rank: it ends us
    assign("OMP_NUM_THREADS", "1")
    _Process(socket.socket(fileno=control), [socket.socket(fileno=lane) for lane in lanes]).run()


def _end_with(parent: int) -> None:
    """Be killed when the rank's thread that started us ends: it lives as long as the rank does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(0)


class _Process:
    """Answers the control socket on the main thread, and each lane on a thread of its own."""

    def __init__(self, control: socket.socket, lanes: Sequence[socket.socket]) -> None:
        self._control = control
        self._lanes = lanes
        self._encode = msgspec.msgpack.encode
        self._decode = msgspec.msgpack.Decoder(Order).decode
        self._engine: Engine | None = None
        self._maps: list[mmap.mmap] = []

    def run(self) -> NoReturn:
        """Obey until the rank closes the control socket."""
        while self.obey():
            pass
        os._exit(0)

    def obey(self) -> bool:
        """Answer the next order; False where the rank has closed the control socket."""
        frame, files, flags, _ = socket.recv_fds(self._control, FRAME_BYTES, 1)
        if not frame:
            return False
        answer: Answer
        try:
            if flags & socket.MSG_TRUNC:
                raise TransferError(f"it is longer than {FRAME_BYTES} bytes")
            order = self._decode(frame)
        except (TransferError, msgspec.MsgspecError) as error:
            answer = Failed(message=f"the transfer process cannot read an order: {error}")
        else:
            answer = self._answer(order, files)
        self._control.send(self._encode(answer))
        return True

    def _answer(self, order: Order, files: Sequence[int]) -> Answer:
        try:
            return self._do(order, files)
        except (OSError, OperatorError, TransferError) as error:
            return Failed(message=str(error), operator=isinstance(error, OperatorError))

    def _do(self, order: Order, files: Sequence[int]) -> Answer:
        match order:
            case Start(host=host, protocol=protocol, device=device, used=used):
                with _muted():
                    self._engine = engine = fresh_engine(host, protocol, device, used)
                for lane in self._lanes:
                    threading.Thread(target=_serve, args=(engine, lane), daemon=True).start()
                return Ready(address=engine.address)
            case Open(offset=offset, length=length):
                assert self._engine is not None, "Start comes first"
                address = self._map(files[0]) + offset
                self._engine.register(address, length)
                return Opened(address=address)
            case Check():
                assert self._engine is not None, "Start comes first"
                return Ready(address=self._engine.address)

    def _map(self, file: int) -> int:
        mapped, address = map_file(file)
        os.close(file)  # the mapping has its own
        self._maps.append(mapped)
        return address


@contextmanager
def _muted() -> Iterator[None]:
    """Without stderr: Mooncake logs an error and a warning whenever it starts, about nothing."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _serve(engine: Engine, lane: socket.socket) -> None:
    """Do the writes of one lane, one after the other, until the rank closes it."""
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(Write).decode
    try:
        while frame := lane.recv(FRAME_BYTES):
            order = decode(frame)
            numbers = memoryview(order.columns).cast("q").tolist()
            count = len(numbers) // 3
            code = engine.write(
                order.target, numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
            )
            lane.send(encode(Written(code=code)))
    except ConnectionError:
        return  # nobody waits for the answer


if __name__ == "__main__":
    main(sys.argv[1:])
