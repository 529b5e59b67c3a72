"""A KV write that fails is made good once, on fresh engines on both sides; then the room ends."""

from __future__ import annotations

import pytest

from disagg.receiver import Ready, Released
from disagg.registers import Closed
from disagg.transport.inproc import Fault, InprocTransport
from tests.support.handoff_sides import SLOTS


class TestFailedWrites:
    """Both sides, with what one says given to the other until there is nothing left to say."""

    @pytest.fixture(autouse=True)
    def pair(self, hub, prefill, decode):
        self.prefill, self.decode = prefill, decode
        self.faults = []  # of the writes to come
        hub.fault = lambda target, copies: self.faults.pop(0) if self.faults else Fault.NONE
        prefill.memory[:4] = 7
        prefill.sender.open(1, "r", 4)
        decode.receiver.announce(1, "r", "p", 0, SLOTS + 8)

    def talk(self):
        closed, outcomes = [], []
        for _ in range(8):
            for message in self.decode.take():
                self.prefill.hear(message)
            closed += self.prefill.run()
            for message in self.prefill.take():
                self.decode.hear(message)
            outcomes += self.decode.receiver.poll()
        return closed, outcomes

    def finish(self):
        self.prefill.sender.push(1, SLOTS)
        self.prefill.sender.finish(1, 5)

    @pytest.mark.parametrize("fault", [Fault.FAIL, Fault.LATE])
    def test_one_is_made_good_in_the_second_generation(self, hub, fault):
        first = self.decode.transport.address
        self.faults = [fault]
        self.finish()
        closed, outcomes = self.talk()
        assert closed == [Closed(1, True, "")]
        assert outcomes == [Ready(1, 5)]
        assert (self.decode.memory[8:12] == 7).all()
        assert self.decode.transport.address != first
        report = self.decode.receiver.report()
        assert (report.retries, report.fences, report.failed) == (1, 1, {})

    def test_two_end_the_room_with_what_went_wrong_first(self):
        first = self.decode.transport.address
        self.faults = [Fault.LATE, Fault.FAIL]
        self.finish()
        closed, outcomes = self.talk()
        assert [room.ok for room in closed] == [False]
        failed, released = outcomes
        assert failed.message.startswith(f"a KV write failed: write to {first} timed out; then ")
        assert released == Released(1)
        assert self.decode.receiver.report().failed == {"write_failed": 1}

    def test_a_receiver_whose_address_died_announces_another(self, monkeypatch):
        died = property(lambda transport: transport.address == "inproc:1")
        monkeypatch.setattr(InprocTransport, "lost", died)
        assert self.decode.transport.address == "inproc:1"
        self.talk()
        self.finish()
        assert self.talk() == ([Closed(1, True, "")], [Ready(1, 5)])
        assert self.decode.receiver.report().fences == 1

    def test_a_peer_that_moved_or_is_gone_is_forgotten(self, monkeypatch):
        forgotten = []
        monkeypatch.setattr(InprocTransport, "forget", lambda _, target: forgotten.append(target))
        self.faults = [Fault.FAIL]
        first = self.decode.transport.address
        self.finish()
        self.talk()
        assert forgotten == [first]
        self.prefill.sender.on_peer_lost("d")
        assert forgotten == [first, self.decode.transport.address]
