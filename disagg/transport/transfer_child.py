"""A rank's hold on one of its transfer processes: start it, ask it, write through it, kill it."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from core.errors import PreflightError, TransferError
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
from disagg.transport.underway import Underway

MODULE = "disagg.transport.transfer_process"
ROOT = Path(__file__).parents[2]  # where that is found, whatever this process's own path is
LANES = 8  # writes under way at once
START_LIMIT_S = 60.0  # on a machine that is very busy, or of a very large pool; else 0.1 s
CHECK_LIMIT_S = 5.0
WRITE_LIMIT_S = 4.5  # of a batch; the engine's own limits do not hold for the first to a peer

T = TypeVar("T")


class SharedPart(NamedTuple):
    """A stretch of a memory file, open to transfers."""

    file: int
    offset: int
    length: int  # bytes


class TransferChild:
    """One process with one engine, from its start to ``end``.

    Make it on a thread that lives as long as this process: the child dies with that thread. Raises
    PreflightError when the library cannot be loaded, TransferError when it cannot start.
    """

    def __init__(self, start: Start) -> None:
        pairs = [_pair() for _ in range(1 + LANES)]
        self._encode = msgspec.msgpack.encode
        self._answer = msgspec.msgpack.Decoder(Answer).decode
        self._written = msgspec.msgpack.Decoder(Written).decode
        self._control, *lanes = (ours for ours, _ in pairs)
        self._lanes: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for lane in lanes:
            lane.settimeout(WRITE_LIMIT_S)
            self._lanes.put(lane)
        self._control.settimeout(START_LIMIT_S)
        self._process = _spawn([theirs for _, theirs in pairs])
        self.underway = Underway()  # ``end`` waits for it
        self.targets: set[str] = set()  # peers that were written to
        self.bases: list[int] = []  # where each part that was opened lies in the child
        try:
            self.address = self._ask(start, Ready).address
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> bool:
        """Whether the process has ended, by itself or by us."""
        return self._process.poll() is not None

    def open(self, part: SharedPart) -> None:
        """Map a part and let transfers use it. Raises TransferError."""
        order = Open(offset=part.offset, length=part.length)
        self.bases.append(self._ask(order, Opened, part.file).address)

    def check(self) -> None:
        """Raise TransferError unless it answers. Surer than ``lost``: ending takes a while."""
        self._control.settimeout(CHECK_LIMIT_S)
        self._ask(Check(), Ready)
        self._control.settimeout(START_LIMIT_S)

    def write(self, target: str, columns: bytes) -> None:
        """One batch, from any thread; see transfer_messages.Write. Raises TransferError."""
        self.targets.add(target)
        try:
            lane = self._lanes.get(timeout=WRITE_LIMIT_S)
        except queue.Empty:
            raise TransferError(f"no Mooncake write to {target} could begin") from None
        try:
            lane.send(self._encode(Write(target=target, columns=columns)))
            frame = lane.recv(FRAME_BYTES)
        except TimeoutError:
            # Not put back: its thread in the child is still in that write, and its answer, should
            # it come, would be taken for that of the next one. A failed write ends in a fence, and
            # the next child has all its lanes.
            lane.close()
            words = f"Mooncake write to {target} took more than {WRITE_LIMIT_S:g} s"
            raise TransferError(words) from None
        except OSError:
            frame = b""
        if not frame:
            lane.close()
        self._lanes.put(lane)  # a closed one fails the next write at once
        if not frame:
            raise TransferError(f"the transfer process ended, and with it a write to {target}")
        if code := self._written(frame).code:
            raise TransferError(f"Mooncake write to {target} failed (code {code})")

    def end(self, drain_s: float = 0.0) -> None:
        """Let nothing more land or be read. Returns when that is so.

        Writes under way have ``drain_s`` to return, then they fail. A killed process that has been
        waited for has no thread, no memory and no socket left. Any number of times.
        """
        self.underway.wait(drain_s)
        self._process.kill()
        self._process.wait()
        self._control.close()
        for _ in range(self._lanes.qsize()):  # those in use are closed by their writers
            with suppress(queue.Empty):
                lane = self._lanes.get_nowait()
                lane.close()
                self._lanes.put(lane)

    def _ask(self, order: Order, kind: type[T], *files: int) -> T:
        """An order on the control socket, and its answer."""
        try:
            socket.send_fds(self._control, [self._encode(order)], files)
            frame = self._control.recv(FRAME_BYTES)
        except TimeoutError:
            raise TransferError("the transfer process did not answer in time") from None
        except OSError:
            frame = b""
        if not frame:
            raise TransferError("the transfer process ended while it started")
        answer = self._answer(frame)
        if isinstance(answer, Failed):
            raise (PreflightError if answer.operator else TransferError)(answer.message)
        assert isinstance(answer, kind), (order, answer)
        return answer


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _spawn(theirs: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """Run the module with these sockets, its own from then on. No fork: vfork and exec."""
    files = [each.fileno() for each in theirs]
    try:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, *map(str, (os.getpid(), *files))],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a rank may answer its launcher there
            cwd=ROOT,
        )
    except OSError as error:
        raise TransferError(f"no transfer process could be started: {error}") from error
    finally:
        for each in theirs:
            each.close()
