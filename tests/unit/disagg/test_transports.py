"""Late writes of the in-process transport, region tables, and Mooncake's start-up failures."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from core.errors import PreflightError, TransferError
from disagg.transport.base import Copy, MemoryRegion, RegionTable
from disagg.transport.inproc import Fault, Hub, InprocTransport
from disagg.transport.mooncake_inline import InlineMooncakeTransport


class TestLateWrites:
    @pytest.fixture(autouse=True)
    def pair(self):
        self.hub = Hub(fault=lambda target, copies: Fault.LATE)
        self.source, self.target = np.full(32, 1, np.uint8), np.zeros(32, np.uint8)
        self.writer, self.reader = InprocTransport(self.hub), InprocTransport(self.hub)
        for transport, memory in ((self.writer, self.source), (self.reader, self.target)):
            transport.register([MemoryRegion(int(memory.ctypes.data), 32)])

    def write(self):
        copies = [
            Copy(int(self.source.ctypes.data) + at, int(self.target.ctypes.data) + at, 16)
            for at in (0, 16)
        ]
        with pytest.raises(TransferError):
            self.writer.write(self.reader.address, copies)

    def test_the_rest_lands_later_with_what_the_source_holds_then(self):
        self.write()
        assert self.target.tolist() == [1] * 16 + [0] * 16
        self.source[:] = 9
        assert self.hub.release_late(self.hub.late[0])
        assert self.target.tolist() == [1] * 16 + [9] * 16

    def test_nothing_lands_after_the_target_renewed(self):
        self.write()
        self.reader.renew()
        self.target[:] = 0
        assert not self.hub.release_late(self.hub.late[0])
        assert not self.target.any()

    def test_the_source_is_not_read_after_the_writer_renewed(self):
        self.write()
        self.writer.renew()
        self.source[:] = 9
        assert self.hub.release_late(self.hub.late[0])
        assert self.target.tolist() == [1] * 32

    def test_a_failed_write_leaves_nothing(self):
        self.hub.fault = lambda target, copies: Fault.FAIL
        self.write()
        assert not self.target.any()
        assert not self.hub.late


def test_a_range_must_lie_in_one_region():
    table = RegionTable([MemoryRegion(100, 10), MemoryRegion(110, 10), MemoryRegion(200, 5)])
    assert table.holds([100, 200], [10, 5])
    for address, length in ((99, 1), (105, 10), (119, 2), (120, 1), (204, 2)):
        assert not table.holds([address], [length]), address
    assert not RegionTable().holds([100], [1])


def test_a_missing_system_library_names_the_command(monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, name):
            raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "mooncake.engine", Broken("mooncake.engine"))
    with pytest.raises(PreflightError, match="apt-get install -y libibverbs1"):
        InlineMooncakeTransport("127.0.0.1")


class FakeEngine:
    """Stands in for the foreign library's engine; ``ports`` are what it will be given."""

    code = 0

    def initialize(self, host, metadata, protocol, device):
        return self.code

    def get_rpc_port(self):
        return self.ports.pop(0)

    def register_memory(self, address, length):
        return self.code

    def unregister_memory(self, address):
        return 0


@pytest.fixture
def fake(monkeypatch):
    module = ModuleType("mooncake.engine")
    module.TransferEngine = type("Engine", (FakeEngine,), {"ports": []})
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    return module.TransferEngine


def test_a_port_that_was_used_before_is_not_used_again(fake):
    fake.ports += [15001, 15002, 15001, 15002, 15003]
    transport = InlineMooncakeTransport("host")
    assert transport.renew() == "host:15002"
    assert transport.renew() == "host:15003"


def test_a_failed_start_is_seen_in_the_return_code(fake):
    fake.code = -1
    with pytest.raises(TransferError, match="ports 15000 to 17000"):
        InlineMooncakeTransport("host")
