"""The sender's writer threads take rooms on by themselves, whatever the engine's thread does."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from core.errors import TransferError
from core.wire import pack_ids
from disagg.geometry import PageGeometry
from disagg.messages import Announcement, Done, to_decode_codec, to_prefill_codec
from disagg.registers import Closed
from disagg.sender import Sender
from disagg.transport.base import MemoryRegion
from disagg.transport.inproc import Fault, Hub, InprocTransport

GEOMETRY = PageGeometry(kind="mla", slot_bytes=(8,), dtype="float32", revision="r")
SLOTS = 64
ROOM_SLOTS = 8


class Pool:
    def __init__(self, hub):
        self.memory = np.random.default_rng(0).integers(0, 99, (SLOTS, 8)).astype(np.uint8)
        self.bases = (self.memory.ctypes.data,)
        self.transport = InprocTransport(hub)
        self.transport.register([MemoryRegion(self.bases[0], self.memory.nbytes)])


class Rank:
    """A prefill rank with real writer threads; what it says arrives in ``said``."""

    def __init__(self, wake=None, **faults):
        self.hub = Hub(**faults)
        self.pool, self.peer = Pool(self.hub), Pool(self.hub)
        self.peer.memory[:] = 0
        self.said = []
        self.heard = threading.Event()
        self.woken = threading.Event()
        self.sender = Sender(
            self.pool.transport, GEOMETRY, self.pool.bases, self.hear, wake or self.woken.set
        )

    def hear(self, peer, data):
        self.said.append(to_decode_codec().decode(data))
        self.heard.set()

    def claim(self, room, slots):
        announced = Announcement(
            room=room,
            rid="r",
            generation=1,
            held=0,
            pages=pack_ids(slots),
            geometry=GEOMETRY,
            address=self.peer.transport.address,
            bases=self.peer.bases,
        )
        self.sender.on_message("d", to_prefill_codec().encode(announced))


def of_room(room):
    """The slots of one of several rooms, no other's."""
    return np.arange(room * ROOM_SLOTS, (room + 1) * ROOM_SLOTS, dtype=np.int32)


@pytest.fixture
def rank():
    rank = Rank()
    yield rank
    rank.sender.close()


def test_done_does_not_wait_for_the_engines_thread(rank):
    """Which may be in the middle of a step: nobody polls here before Done is heard."""
    rank.sender.open(0, "r", ROOM_SLOTS)
    rank.claim(0, of_room(0))
    for upto in (3, 5, ROOM_SLOTS):
        rank.sender.push(0, of_room(0)[:upto])
    rank.sender.finish(0, 7)
    assert rank.heard.wait(10)
    assert [type(message) for message in rank.said] == [Done]
    assert (rank.peer.memory[of_room(0)] == rank.pool.memory[of_room(0)]).all()
    assert rank.woken.wait(10)
    assert rank.sender.poll(0.0) == [Closed(0, True, "")]


def test_many_rooms_at_once(rank):
    """Chunks are pushed while writes of all rooms end; every room is told of and closed once."""
    rooms = range(SLOTS // ROOM_SLOTS)
    for room in rooms:
        rank.sender.open(room, "r", ROOM_SLOTS)
        rank.claim(room, of_room(room)[::-1].copy())
    for upto in range(1, ROOM_SLOTS + 1):
        for room in rooms:
            rank.sender.push(room, of_room(room)[:upto])
    for room in rooms:
        rank.sender.finish(room, room)
    closed = []
    while len(closed) < len(rooms):
        assert rank.woken.wait(10)
        rank.woken.clear()
        closed += rank.sender.poll(0.0)
    assert sorted(one.room for one in closed) == list(rooms)
    assert sorted((d.room, d.first_token) for d in rank.said) == [(r, r) for r in rooms]
    for room in rooms:
        there = rank.peer.memory[of_room(room)[::-1]]
        assert (there == rank.pool.memory[of_room(room)]).all()
    assert rank.sender.counts() == {}


def test_what_breaks_on_a_writer_thread_ends_the_owner():
    """A failed write is renewed on a writer thread; where that fails the rank cannot go on."""
    wakes, broke = iter("12"), threading.Event()

    def broken():
        raise TransferError("no port is left")

    def wake():
        """Once for the write, once for the renewal."""
        if next(wakes) == "2":
            broke.set()

    rank = Rank(wake, fault=lambda *_: Fault.FAIL)
    rank.pool.transport.renew = broken
    rank.sender.open(0, "r", ROOM_SLOTS)
    rank.claim(0, of_room(0))
    rank.sender.push(0, of_room(0))
    assert broke.wait(10)
    rank.sender.close()
    with pytest.raises(TransferError, match="no port is left"):
        rank.sender.poll(0.0)
