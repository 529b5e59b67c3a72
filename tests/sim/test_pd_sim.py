"""Prefill and decode engines under random delays, aborts, lost links, failed and late writes."""

from __future__ import annotations

import pytest

from tests.support.pd_world import PdWorld


@pytest.mark.parametrize("seed", range(60))
def test_calm_worlds_give_the_reference_tokens(seed):
    world = PdWorld(seed)
    world.run(25)
    assert not any(asked.stopped for asked in world.asked.values())


@pytest.mark.parametrize("seed", range(60))
def test_aborts_leave_every_page_and_the_other_streams_alone(seed):
    PdWorld(seed, aborts=0.4).run(25)


@pytest.mark.parametrize("seed", range(60))
def test_late_writes_and_lost_links_never_reach_another_owners_pages(seed):
    PdWorld(seed, late=0.15, link_losses=3, aborts=0.2).run(25)


def test_the_worlds_are_as_bad_as_they_claim():
    retracted = failed = moved = local = 0
    for seed in range(20):
        world = PdWorld(seed, late=0.15, link_losses=3, aborts=0.2)
        world.run(25)
        retracted += world.decode.scheduler.retractions
        failed += sum(asked.stopped for asked in world.asked.values())
        moved += world.decode.role.kv_bytes[1]
        local += world.decode.role.transfers().placed.get("local", 0)
    assert retracted
    assert failed
    assert moved
    assert local
