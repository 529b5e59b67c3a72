"""What a rank keeps of its transfer processes, and what one answers to a frame it cannot read."""

from __future__ import annotations

import itertools
import socket

import msgspec
import pytest

from disagg.transport import mooncake
from disagg.transport.mooncake import MooncakeTransport
from disagg.transport.mooncake_engine import AVOIDED
from disagg.transport.transfer_messages import FRAME_BYTES, Answer, Failed, Start
from disagg.transport.transfer_process import _Process
from disagg.transport.underway import Underway


class Child:
    """A TransferChild without a process: each has the next port."""

    starts: list[Start]
    ports: itertools.count

    def __init__(self, start):
        self.starts.append(start)
        self.address = f"{start.host}:{next(self.ports)}"
        self.bases, self.lost, self.underway = [], False, Underway()

    def check(self):
        pass

    def end(self, drain_s=0.0):
        pass


@pytest.fixture
def starts(monkeypatch):
    started: list[Start] = []
    kind = type("FreshChild", (Child,), {"starts": started, "ports": itertools.count(10_000)})
    monkeypatch.setattr(mooncake, "TransferChild", kind)
    return started


def test_of_thousands_of_addresses_the_latest_are_avoided_and_fit_a_frame(starts):
    host = "fe80:1234:1234:1234:1234:1234:1234:1234%eth1234"
    transport = MooncakeTransport(host)
    had = [transport.address, *(transport.renew() for _ in range(2_100))]
    transport.close()
    assert len(set(had)) == len(had)
    last = starts[-1]
    assert len(last.used) == AVOIDED
    assert set(had[-AVOIDED + 2 :]) <= set(last.used)
    assert len(msgspec.msgpack.encode(last)) < FRAME_BYTES


@pytest.mark.parametrize(
    ("frame", "words"), [(b"\xff", "cannot read an order"), (bytes(FRAME_BYTES + 1), "longer than")]
)
def test_a_frame_that_makes_no_sense_is_answered(frame, words):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = _Process(theirs, [])
        ours.send(frame)
        assert process.obey()
        answer = msgspec.msgpack.decode(ours.recv(FRAME_BYTES), type=Answer)
        assert isinstance(answer, Failed)
        assert words in answer.message
