"""The soak that ``make soak`` runs a million handoffs of, for a little while."""

from __future__ import annotations

import pytest

from tests.sim import handoff_soak
from tests.sim.handoff_soak import ROOMS, run_worlds, soak

HANDOFFS = 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_handoffs_break_no_law():
    steps = list(soak(HANDOFFS, seed=1_000_000, processes=2))
    assert [failure for _, failures in steps for failure in failures] == []
    assert steps[-1][0] >= HANDOFFS


def test_a_broken_law_names_its_world(monkeypatch):
    def fail_in_eight(seed: int) -> None:
        assert seed != 8, "a late write"

    monkeypatch.setattr(handoff_soak, "run_world", fail_in_eight)
    (failure,) = run_worlds(5, 10)
    assert failure.startswith("world 8, Trouble(")
    assert "a late write" in failure


def test_handoffs_are_counted_in_whole_worlds():
    (step,) = soak(ROOMS + 1, seed=3, processes=1)
    assert step == (2 * ROOMS, [])
