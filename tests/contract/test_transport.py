"""What every KV transport promises, asked of all that this machine can run."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import EngineError, TransferError
from core.shared_memory import SharedMemory
from disagg.transport.base import TRANSPORTS, Copy, MemoryRegion
from disagg.transport.inproc import Hub

SIZE = 1 << 20


def cases():
    for name in TRANSPORTS.usable():
        marks = () if name == "inproc" else (pytest.mark.cluster,)
        yield pytest.param(name, marks=marks)


@pytest.fixture(params=cases())
def make(request):
    """Build transports of one kind that can reach each other; all are closed afterwards."""
    where = Hub() if request.param == "inproc" else "127.0.0.1"
    made = []

    def build():
        made.append(TRANSPORTS.load(request.param)(where))
        return made[-1]

    yield build
    for transport in made:
        transport.close()


class End:
    """A transport and two registered pieces of memory, the second of them in use."""

    def __init__(self, transport, fill):
        self.transport = transport
        other, shared = SharedMemory(4096), SharedMemory(SIZE + 4096)
        self.whole = np.frombuffer(shared.buffer, np.uint8)
        self.memory = self.whole[4096:]
        self.memory[:] = fill
        self.base = int(self.memory.ctypes.data)
        transport.register([MemoryRegion(other.address, 4096, other.file)])
        transport.register([MemoryRegion(self.base, SIZE, shared.file, 4096)])

    @property
    def there(self):
        """What peers call the beginning of the memory."""
        (address,) = self.transport.exported([self.base])
        return address


@pytest.fixture
def ends(make):
    source, target = End(make(), 0), End(make(), 255)
    source.memory[:] = np.arange(SIZE, dtype=np.uint32).astype(np.uint8) % 251
    return source, target


def test_written_bytes_are_there_on_return_and_no_others(ends):
    source, target = ends
    source.transport.write(
        target.transport.address, [Copy(source.base + 5, target.there + 100, 1000)]
    )
    assert (target.memory[100:1100] == source.memory[5:1005]).all()
    assert (target.memory[:100] == 255).all()
    assert (target.memory[1100:] == 255).all()


def test_more_blocks_than_any_queue_holds(ends):
    source, target = ends
    copies = [Copy(source.base + 64 * i, target.there + 128 * i, 64) for i in range(5000)]
    source.transport.write(target.transport.address, copies)
    got = target.memory[: 5000 * 128].reshape(5000, 128)
    assert (got[:, :64] == source.memory[: 5000 * 64].reshape(5000, 64)).all()
    assert (got[:, 64:] == 255).all()


def test_nothing_to_write_is_fine(ends):
    source, target = ends
    source.transport.write(target.transport.address, [])


def test_memory_the_target_did_not_register_is_refused(ends, make):
    source, target = ends
    stranger = np.zeros(64, np.uint8)
    with pytest.raises(TransferError):
        source.transport.write(
            target.transport.address, [Copy(source.base, int(stranger.ctypes.data), 64)]
        )
    assert not stranger.any()


def test_an_unregistered_source_is_our_own_defect(ends):
    source, target = ends
    stranger = np.zeros(64, np.uint8)
    for address in (int(stranger.ctypes.data), source.base + SIZE - 32):
        with pytest.raises(EngineError):
            source.transport.write(target.transport.address, [Copy(address, target.there, 64)])
    assert (target.memory == 255).all()


def test_after_renew_the_old_address_is_dead_and_the_new_one_works(ends):
    source, target = ends
    old = target.transport.address
    copies = [Copy(source.base, target.there, SIZE)]
    source.transport.write(old, copies)
    new = target.transport.renew()
    assert new == target.transport.address != old
    target.memory[:] = 255
    with pytest.raises(TransferError):
        source.transport.write(old, copies)
    assert (target.memory == 255).all()
    source.transport.write(new, [Copy(source.base, target.there, SIZE)])
    assert (target.memory == source.memory).all()


def test_a_renewed_writer_goes_on(ends):
    source, target = ends
    source.transport.renew()
    source.transport.write(target.transport.address, [Copy(source.base, target.there, SIZE)])
    assert (target.memory == source.memory).all()


def test_a_writer_that_forgot_its_peer_can_still_write(ends):
    source, target = ends
    copies = [Copy(source.base, target.there, 64)]
    source.transport.write(target.transport.address, copies)
    source.transport.forget(target.transport.address)
    source.transport.write(target.transport.address, copies)
    assert (target.memory[:64] == source.memory[:64]).all()


def test_what_is_not_registered_has_no_name_for_peers(ends):
    source, _ = ends
    for address in (source.base - 1, source.base + SIZE):
        with pytest.raises(EngineError):
            source.transport.exported([address])


def test_a_transport_that_works_is_not_lost(ends):
    source, target = ends
    assert not source.transport.lost
    target.transport.renew()
    assert not target.transport.lost
    target.transport.close()
    assert not target.transport.lost


def test_addresses_never_repeat(ends):
    _, target = ends
    seen = {target.transport.address} | {target.transport.renew() for _ in range(3)}
    assert len(seen) == 4


def test_a_closed_target_is_unreachable(ends, make):
    source, _ = ends
    gone = End(make(), 255)
    address = gone.transport.address
    gone.transport.close()
    with pytest.raises(TransferError):
        source.transport.write(address, [Copy(source.base, gone.there, 64)])
    assert (gone.memory == 255).all()
