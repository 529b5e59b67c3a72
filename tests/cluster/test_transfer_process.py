"""The transfer process: it ends with its rank, its end is the fence, and nothing is left of it."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from core.clock import RealClock
from core.errors import EngineError, PreflightError, TransferError
from disagg.transport.base import Copy, MemoryRegion
from disagg.transport.mooncake import MooncakeTransport
from tests.support.kv_peer import KvEnd, PeerProcess
from tests.support.tcp_sockets import CLOSE_WAIT, sockets

pytestmark = pytest.mark.cluster
SIZE = 64 << 20
PAGE = 4096
CLOCK = RealClock()

HOLD_AND_WAIT = """
import socket, sys
from disagg.transport.transfer_child import TransferChild
from disagg.transport.transfer_messages import Start

child = TransferChild(Start(host="127.0.0.1", protocol="tcp", device="", used=()))
ours = [child._control, *(child._lanes.get() for _ in range(child._lanes.qsize()))]
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"%d" % child.pid],
                [each.fileno() for each in ours])
sys.stdin.read()
"""


def until(true, limit_s=10.0):
    deadline = CLOCK.now() + limit_s
    while not (value := true()):
        assert CLOCK.now() < deadline, "it does not become so"
    return value


def gone(pid):
    """Whether a process has ended: a zombie without threads has nothing but its exit code."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return words[0] == "Z" and words[17] == "1"


def took(action):
    began = CLOCK.now()
    action()
    return CLOCK.now() - began


@pytest.fixture
def make():
    made = []

    def build(fill=0):
        made.append(KvEnd("mooncake", SIZE, fill))
        return made[-1]

    yield build
    for end in made:
        end.transport.close()


@pytest.fixture
def ends(make):
    """A writer with ones in its memory, and a target."""
    return make(fill=1), make()


def write(source, target, length=SIZE):
    address, base = target.where
    source.transport.write(address, [Copy(source.base, base, length)])


class TestItsLife:
    def test_it_is_killed_with_its_rank_though_its_sockets_stay_open(self):
        """As when another process of the rank's has inherited them."""
        here, there = socket.socketpair()
        command = [sys.executable, "-c", HOLD_AND_WAIT, str(there.fileno())]
        rank = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[there.fileno()])
        with here, there, rank:
            pid, files, _, _ = socket.recv_fds(here, 64, 16)
            assert not gone(int(pid))
            rank.kill()
            until(lambda: gone(int(pid)))
            for file in files:
                os.close(file)

    def test_it_ends_when_its_rank_closes_the_control_socket(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(os.getpid()), str(theirs.fileno())]
        command = [sys.executable, "-m", "disagg.transport.transfer_process", *words]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            ours.close()
            assert process.wait(20) == 0

    def test_it_does_not_start_for_another_parent(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "disagg.transport.transfer_process", "1"]
        command.append(str(theirs.fileno()))
        with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
            assert process.wait(20) == 0

    def test_a_killed_rank_leaves_no_process(self):
        peer = PeerProcess("mooncake", SIZE, fill=0)
        mover = peer.mover
        assert not gone(mover)
        os.kill(peer.process.pid, signal.SIGKILL)
        peer.process.join(20)
        until(lambda: gone(mover))
        peer.end()

    def test_signals_to_the_whole_group_do_not_end_it(self, ends):
        source, target = ends
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(source.pid, number)
        write(source, target, PAGE)
        assert target.memory[:PAGE].all()
        assert not source.transport.lost

    def test_it_is_small_and_its_memory_has_no_name(self, make):
        before = set(Path("/dev/shm").iterdir())
        end = make()
        maps = Path(f"/proc/{end.pid}/maps").read_text()
        assert "torch" not in maps
        assert "numpy" not in maps
        assert "memfd:antiphon-kv" in maps
        assert set(Path("/dev/shm").iterdir()) <= before

    def test_closing_ends_the_spare_too(self, make):
        end = make()
        spare = until(lambda: end.transport._spare)
        assert not gone(end.pid)
        end.transport.close()
        assert gone(end.pid)
        assert gone(spare.pid)

    def test_a_start_that_fails_says_what_to_do(self, monkeypatch, tmp_path):
        (tmp_path / "mooncake").mkdir()
        (tmp_path / "mooncake/__init__.py").touch()
        (tmp_path / "mooncake/engine.py").write_text("raise ImportError('no libibverbs.so.1')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(PreflightError, match="apt-get install -y libibverbs1"):
            MooncakeTransport("127.0.0.1")

    def test_private_memory_is_our_own_defect(self, make):
        with pytest.raises(EngineError, match="shared memory"):
            make().transport.register([MemoryRegion(4096, 4096)])


class TestTheFence:
    def test_it_takes_tens_of_milliseconds_and_other_threads_go_on(self, make):
        end = make()
        pauses, stop = [], threading.Event()

        def tick():
            last = CLOCK.now()
            while not stop.wait(0.001):
                pauses.append(CLOCK.now() - last)
                last = CLOCK.now()

        ticker = threading.Thread(target=tick)
        ticker.start()
        fences = [took(end.transport.renew)]
        for _ in range(4):
            until(lambda: end.transport._spare is not None)
            pauses.clear()
            fences.append(took(end.transport.renew))
        stop.set()
        ticker.join()
        assert min(fences) < 0.1, fences
        assert sorted(fences)[2] < 1.0, fences
        assert pauses, "the interpreter was held"

    def test_nothing_lands_after_it(self, make):
        target = make()
        peer = PeerProcess("mooncake", SIZE, fill=9)
        address, base = target.where
        at = [(i * PAGE, base + i * PAGE, PAGE) for i in range(SIZE // PAGE)]
        peer.tell("write", address, at)
        until(target.memory[::PAGE].any)
        target.transport.renew()
        target.memory[:] = 0
        assert peer.hear(), "the write was cut off, and has to fail"
        assert not target.memory.any()
        peer.end()

    def test_a_healthy_write_under_way_is_waited_for(self, ends):
        source, target = ends
        outcome = queue.SimpleQueue()

        def run():
            try:
                write(source, target)
            except TransferError as error:
                outcome.put(error)
            else:
                outcome.put(None)

        writer = threading.Thread(target=run)
        writer.start()
        until(target.memory[::PAGE].any)
        source.transport.renew()
        writer.join()
        assert outcome.get() is None
        assert target.memory.all()

    def test_a_write_that_hangs_is_not(self, ends):
        source, target = ends
        write(source, target, PAGE)
        os.kill(target.pid, signal.SIGSTOP)
        failed = threading.Event()

        def run():
            with pytest.raises(TransferError, match="the transfer process ended"):
                write(source, target)
            failed.set()

        writer = threading.Thread(target=run)
        writer.start()
        until(lambda: source.transport._child.underway._writes)
        assert took(source.transport.renew) < 5.0
        assert failed.wait(1.0)
        writer.join()
        os.kill(target.pid, signal.SIGCONT)

    def test_no_connection_to_a_fenced_or_forgotten_engine_stays(self, ends):
        source, target = ends
        write(source, target, PAGE)
        before, address = source.pid, target.transport.address
        target.transport.renew()
        until(lambda: sockets(before, CLOSE_WAIT))
        source.transport.forget(address)
        until(lambda: source.pid != before)
        write(source, target, PAGE)
        assert until(lambda: gone(before))
        for pid in (source.pid, target.pid, os.getpid()):
            assert sockets(pid, CLOSE_WAIT) == 0

    def test_a_peer_never_written_to_costs_nothing_to_forget(self, ends):
        source, target = ends
        before = source.pid
        source.transport.forget(target.transport.address)
        write(source, target, PAGE)
        assert source.pid == before

    def test_the_descriptors_of_a_rank_do_not_grow(self, ends):
        source, target = ends

        def once():
            write(source, target, PAGE)
            for end in ends:
                end.transport.renew()
                until(lambda end=end: end.transport._spare is not None)

        once()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(2):
            once()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


class TestItsDeath:
    def test_a_writer_whose_process_is_killed_fails_what_was_under_way_and_goes_on(self, ends):
        source, target = ends
        victim = source.pid
        threading.Thread(
            target=lambda: (
                until(target.memory[::PAGE].any),
                os.kill(victim, signal.SIGKILL),
            )
        ).start()
        address, base = target.where
        copies = [Copy(source.base + at, base + at, PAGE) for at in range(0, SIZE, PAGE)]
        with pytest.raises(TransferError, match="the transfer process ended"):
            source.transport.write(address, copies)
        until(lambda: gone(victim))
        source.transport.write(address, copies)
        assert target.memory.all()

    def test_a_target_whose_process_is_killed_is_lost_until_it_renews(self, ends):
        source, target = ends
        write(source, target, PAGE)
        assert not target.transport.lost
        os.kill(target.pid, signal.SIGKILL)
        until(lambda: target.transport.lost)
        with pytest.raises(TransferError):
            write(source, target)
        target.transport.renew()
        assert not target.transport.lost
        write(source, target)
        assert target.memory.all()

    def test_a_spare_that_died_is_replaced(self, make):
        end = make()
        spare = until(lambda: end.transport._spare)
        os.kill(spare.pid, signal.SIGKILL)
        until(lambda: gone(spare.pid))
        assert end.transport.renew() != spare.address
        assert not end.transport.lost

    @pytest.mark.parametrize("known", [True, False], ids=["known", "first contact"])
    def test_a_write_to_a_stopped_peer_fails_within_five_seconds(self, ends, known):
        source, target = ends
        if known:
            write(source, target, PAGE)
        os.kill(target.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{target.pid}/stat").read_text().split()[2] == "T")

        def attempt():
            with pytest.raises(TransferError):
                write(source, target, PAGE)

        assert took(attempt) < 5.0
        assert took(source.transport.renew) < 2.0
        os.kill(target.pid, signal.SIGCONT)
