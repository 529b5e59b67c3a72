"""Mooncake between two processes: visibility, fences, stopped and killed peers."""

from __future__ import annotations

import os
import signal

import pytest

from core.errors import TransferError
from disagg.transport.base import Copy
from tests.support.kv_peer import KvEnd, PeerProcess

pytestmark = pytest.mark.cluster
SIZE = 64 << 20


@pytest.fixture(params=["mooncake", "mooncake_inline"])
def kind(request):
    return request.param


@pytest.fixture
def peer(kind):
    made = PeerProcess(kind, SIZE, fill=1)
    yield made
    made.end()


@pytest.fixture
def end(kind):
    made = KvEnd(kind, SIZE, fill=0)
    yield made
    made.transport.close()


def test_two_hundred_writes_are_visible_when_they_return(peer, end):
    assert peer.ask("fill", 0) is None
    for turn in range(200):
        end.memory[:4096] = turn % 250 + 1
        end.transport.write(peer.address, [Copy(end.base, peer.base + turn * 4096, 4096)])
        seen = peer.ask("total", turn * 4096, (turn + 1) * 4096)
        assert seen == 4096 * (turn % 250 + 1), turn


def test_renew_shuts_the_old_address_out(peer, end):
    end.memory[:] = 3
    new, base = peer.ask("renew")
    with pytest.raises(TransferError):
        end.transport.write(peer.address, [Copy(end.base, peer.base, SIZE)])
    assert peer.ask("total", 0, SIZE) == SIZE  # all ones, as before
    end.transport.write(new, [Copy(end.base, base, SIZE)])
    assert peer.ask("total", 0, SIZE) == 3 * SIZE


@pytest.mark.parametrize("blocks", [1, 64])
def test_a_writer_stopped_half_way_lands_nothing_after_the_fence(peer, end, blocks):
    step = SIZE // blocks
    address, base = end.where
    peer.tell("write", address, [(i * step, base + i * step, step) for i in range(blocks)])
    while not end.memory[::4096].any():
        pass  # the first bytes are about to land
    os.kill(peer.mover, signal.SIGSTOP)
    end.transport.renew()
    before_waking = int(end.memory[::4096].sum())
    end.memory[:] = 0
    os.kill(peer.mover, signal.SIGCONT)
    answer = peer.hear()
    assert not end.memory.any()
    if before_waking < SIZE // 4096:  # the stop came in time
        assert answer, "a cut-off write must fail"


def test_a_renewed_writer_reads_its_source_no_more(peer, end):
    """The target freezes in the middle; what it takes in on waking had left before."""
    assert peer.ask("fill", 0) is None
    end.memory[:] = 1
    step = 1 << 20
    copies = [Copy(end.base + at, peer.base + at, step) for at in range(0, SIZE, step)]
    peer.tell("freeze_at_first_byte")
    with pytest.raises(TransferError):
        end.transport.write(peer.address, copies)
    end.transport.renew()
    end.memory[:] = 100
    os.kill(peer.mover, signal.SIGCONT)
    assert peer.hear() is None
    assert 0 < peer.ask("total", 0, SIZE) <= SIZE


def test_a_killed_peer_fails_its_write_alone(kind, peer, end):
    other = PeerProcess(kind, SIZE, fill=2)
    try:
        os.kill(peer.process.pid, signal.SIGKILL)
        peer.process.join(30)
        with pytest.raises(TransferError):
            end.transport.write(peer.address, [Copy(end.base, peer.base, SIZE)])
        end.transport.write(other.address, [Copy(end.base, other.base, SIZE)])
        assert other.ask("total", 0, SIZE) == 0
    finally:
        other.end()
