"""Mooncake between two processes: visibility, fences, stopped and killed peers."""

from __future__ import annotations

import multiprocessing
import os
import signal

import numpy as np
import pytest

from core.errors import TransferError
from disagg.transport.base import Copy, MemoryRegion
from disagg.transport.mooncake import MooncakeTransport
from tests.support.kv_peer import serve

pytestmark = pytest.mark.cluster
SIZE = 64 << 20


class Peer:
    """A spawned process with a transport and ``SIZE`` bytes."""

    def __init__(self, fill):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, SIZE, fill))
        self.process.start()
        self.address, self.base = self.hear()

    def hear(self):
        assert self.pipe.poll(30), "the peer does not answer"
        return self.pipe.recv()

    def tell(self, command, *arguments):
        self.pipe.send((command, arguments))

    def ask(self, command, *arguments):
        self.tell(command, *arguments)
        return self.hear()

    def end(self):
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGCONT)
            self.pipe.send(None)
        self.process.join(30)
        self.process.close()


@pytest.fixture
def peer():
    made = Peer(fill=1)
    yield made
    made.end()


@pytest.fixture
def memory():
    return np.zeros(SIZE, np.uint8)


@pytest.fixture
def transport(memory):
    made = MooncakeTransport("127.0.0.1")
    made.register([MemoryRegion(int(memory.ctypes.data), SIZE)])
    yield made
    made.close()


def test_two_hundred_writes_are_visible_when_they_return(peer, memory, transport):
    assert peer.ask("fill", 0) is None
    base = int(memory.ctypes.data)
    for turn in range(200):
        memory[:4096] = turn % 250 + 1
        transport.write(peer.address, [Copy(base, peer.base + turn * 4096, 4096)])
        seen = peer.ask("total", turn * 4096, (turn + 1) * 4096)
        assert seen == 4096 * (turn % 250 + 1), turn


def test_renew_shuts_the_old_address_out(peer, memory, transport):
    memory[:] = 3
    copies = [Copy(int(memory.ctypes.data), peer.base, SIZE)]
    new = peer.ask("renew")
    with pytest.raises(TransferError):
        transport.write(peer.address, copies)
    assert peer.ask("total", 0, SIZE) == SIZE  # all ones, as before
    transport.write(new, copies)
    assert peer.ask("total", 0, SIZE) == 3 * SIZE


@pytest.mark.parametrize("blocks", [1, 64])
def test_a_writer_stopped_half_way_lands_nothing_after_the_fence(peer, memory, transport, blocks):
    step = SIZE // blocks
    base = int(memory.ctypes.data)
    copies = [(peer.base + i * step, base + i * step, step) for i in range(blocks)]
    peer.tell("write", transport.address, copies)
    while not memory[::4096].any():
        pass  # the first bytes are about to land
    os.kill(peer.process.pid, signal.SIGSTOP)
    transport.renew()
    before_waking = int(memory[::4096].sum())
    memory[:] = 0
    os.kill(peer.process.pid, signal.SIGCONT)
    answer = peer.hear()
    assert not memory.any()
    if before_waking < SIZE // 4096:  # the stop came in time
        assert answer, "a cut-off write must fail"


def test_a_renewed_writer_reads_its_source_no_more(peer, memory, transport):
    """The target freezes in the middle; what it takes in on waking had left before."""
    assert peer.ask("fill", 0) is None
    memory[:] = 1
    base, step = int(memory.ctypes.data), 1 << 20
    copies = [Copy(base + at, peer.base + at, step) for at in range(0, SIZE, step)]
    peer.tell("freeze_at_first_byte")
    with pytest.raises(TransferError):
        transport.write(peer.address, copies)
    transport.renew()
    memory[:] = 100
    os.kill(peer.process.pid, signal.SIGCONT)
    assert peer.hear() is None
    assert 0 < peer.ask("total", 0, SIZE) <= SIZE


def test_a_killed_peer_fails_its_write_alone(peer, memory, transport):
    other = Peer(fill=2)
    try:
        os.kill(peer.process.pid, signal.SIGKILL)
        peer.process.join(30)
        copies = [Copy(int(memory.ctypes.data), peer.base, SIZE)]
        with pytest.raises(TransferError):
            transport.write(peer.address, copies)
        copies = [Copy(int(memory.ctypes.data), other.base, SIZE)]
        transport.write(other.address, copies)
        assert other.ask("total", 0, SIZE) == 0
    finally:
        other.end()
