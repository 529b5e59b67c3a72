"""A Sender and a Receiver over real memory, whose messages and writes go when the test says so."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from core.errors import EngineError, TransferError
from core.wire import pack_ids
from disagg.geometry import PageGeometry
from disagg.messages import Announcement, to_decode_codec, to_prefill_codec
from disagg.receiver import Receiver
from disagg.sender import Sender
from disagg.transport.base import MemoryRegion
from disagg.transport.inproc import InprocTransport

GEOMETRY = PageGeometry(kind="mla", slot_bytes=(8,), dtype="float32", revision="r1")
SLOTS = np.arange(4, dtype=np.int32)


class Jobs:
    """Stands in for the writer threads: jobs run when the test says so."""

    def __init__(self):
        self.waiting = []

    def submit(self, job):
        future = Future()
        self.waiting.append((job, future))
        return future

    def run_one(self, at=0):
        job, future = self.waiting.pop(at)
        try:
            future.set_result(job())
        except (TransferError, EngineError) as error:
            future.set_exception(error)

    def run_all(self):
        while self.waiting:
            self.run_one()


class Side:
    def __init__(self, hub, decode):
        self.memory = np.zeros((16, 8), np.uint8)
        self.bases = (self.memory.ctypes.data,)
        self.transport = InprocTransport(hub)
        self.transport.register([MemoryRegion(self.bases[0], self.memory.nbytes)])
        self.out = []
        self._decode = decode

    def send(self, peer, data):
        self.out.append((peer, self._decode(data)))

    def take(self):
        out, self.out = self.out, []
        return [message for _, message in out]


class Prefill(Side):
    def __init__(self, hub, geometry=GEOMETRY, check="sample"):
        super().__init__(hub, to_decode_codec().decode)
        self.jobs = Jobs()
        self.wakes = []
        self.sender = Sender(
            self.transport,
            geometry,
            self.bases,
            self.send,
            lambda: self.wakes.append(1),
            10.0,
            self.jobs.submit,
            check,
        )
        self.encode = to_prefill_codec().encode

    def hear(self, message, peer="d"):
        self.sender.on_message(peer, self.encode(message))

    def run(self, now=0.0):
        closed = []
        for _ in range(20):
            self.jobs.run_all()
            closed += self.sender.poll(now)
        return closed


class Decode(Side):
    def __init__(self, hub):
        super().__init__(hub, to_prefill_codec().decode)
        self.receiver = Receiver(self.transport, GEOMETRY, self.bases, self.send)
        self.encode = to_decode_codec().encode

    def hear(self, message, peer="p"):
        self.receiver.on_message(peer, self.encode(message))


def announcement(decode, room=1, generation=1, held=0, pages=SLOTS, rid="r", geometry=GEOMETRY):
    return Announcement(
        room=room,
        rid=rid,
        generation=generation,
        held=held,
        pages=pack_ids(pages),
        geometry=geometry,
        address=decode.transport.address,
        bases=decode.bases,
    )
