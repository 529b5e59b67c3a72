"""How an engine waits for its writes, over a stand-in for Mooncake's extension type."""

from __future__ import annotations

from collections import Counter

import pytest

from core.clock import VirtualClock
from disagg.transport import mooncake_engine as module
from disagg.transport.mooncake_engine import LIMIT_S, Engine


class Raw:
    """Writes that end after some looks at them, each in a state of its own."""

    def __init__(self) -> None:
        self.ends: list[int] = []  # of the writes in order; 0: it cannot be submitted
        self.looks = 2  # that find a write under way
        self.asked: list[int] = []
        self._seen: Counter[int] = Counter()
        self.submitted: list[tuple[str, int, int, int]] = []
        self.batches: list[tuple[object, ...]] = []

    def initialize(self, *words: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 15000

    def transfer_submit_write(self, target: str, source: int, to: int, length: int) -> int:
        if not self.ends[len(self.submitted)]:
            return 0
        self.submitted.append((target, source, to, length))
        return len(self.submitted)

    def transfer_check_status(self, number: int) -> int:
        self.asked.append(number)
        self._seen[number] += 1
        assert self._seen[number] <= self.looks + 1, "asked again after its end"
        return self.ends[number - 1] if self._seen[number] > self.looks else 0

    def batch_transfer_sync_write(self, *columns: object) -> int:
        self.batches.append(columns)
        return 0


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def engine(monkeypatch, clock):
    monkeypatch.setattr(module, "_engine_class", lambda: Raw)
    return Engine("127.0.0.1", "tcp", "", clock)


def write(engine: Engine) -> int:
    return engine.write("peer", [1, 2, 3], [10, 20, 30], [7, 8, 9])


def test_all_are_under_way_before_any_is_waited_for(engine, clock):
    engine.raw.ends = [1, 1, 1]
    assert write(engine) == 0
    assert engine.raw.submitted == [("peer", 1, 10, 7), ("peer", 2, 20, 8), ("peer", 3, 30, 9)]
    assert engine.raw.asked == [3, 3, 3, 2, 2, 2, 1, 1, 1]
    assert 0 < clock.now() < 0.01


@pytest.mark.parametrize("state", [-1, -2])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_failure_of_any_is_told(engine, state, which):
    engine.raw.ends = [1, 1, 1]
    engine.raw.ends[which] = state
    assert write(engine) == state


@pytest.mark.parametrize("which", [0, 2])
def test_what_cannot_be_submitted_is_a_failure_at_once(engine, which):
    engine.raw.ends = [1, 1, 1]
    engine.raw.ends[which] = 0
    assert write(engine) != 0
    assert engine.raw.asked == []


def test_a_mute_peer_is_not_waited_for_without_end(engine, clock):
    engine.raw.ends, engine.raw.looks = [1, 1, 1], 10**9
    assert write(engine) != 0
    assert LIMIT_S < clock.now() < LIMIT_S + 0.1


def test_over_rdma_a_batch_is_one_call(monkeypatch):
    monkeypatch.setattr(module, "_engine_class", lambda: Raw)
    engine = Engine("127.0.0.1", "rdma", "mlx5_0")
    assert write(engine) == 0
    assert engine.raw.batches == [("peer", [1, 2, 3], [10, 20, 30], [7, 8, 9])]
