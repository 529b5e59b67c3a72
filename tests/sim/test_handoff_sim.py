"""The handoff under random delays, losses, cancels, failed and late writes, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from disagg.receiver import Failed, Outcome, Ready
from tests.support.handoff_world import Trouble, World

CALM = Trouble(cancel=0, abort=0, absent=0, write_fails=0, duplicate=0, link_losses=0)

troubles = st.builds(
    Trouble,
    cancel=st.sampled_from([0.0, 0.2, 0.6]),
    abort=st.sampled_from([0.0, 0.2, 0.6]),
    absent=st.sampled_from([0.0, 0.1]),
    write_fails=st.sampled_from([0.0, 0.1, 0.4]),
    duplicate=st.sampled_from([0.0, 0.3]),
    link_losses=st.sampled_from([0, 2, 8]),
)


def ready_rooms(world: World) -> set[int]:
    return {
        room
        for decode in world.decodes
        for room, outcomes in decode.outcomes.items()
        if isinstance(outcomes[-1], Ready)
    }


def failure(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), trouble=troubles)
def test_no_page_is_released_while_a_peer_may_write_it(seed, trouble):
    World(seed, 16, trouble).run()


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), trouble=troubles)
@pytest.mark.timeout(1800)
def test_the_same_for_a_long_time(seed, trouble):
    World(seed, 24, trouble).run()


def test_a_calm_world_serves_every_room():
    world = World(7, 24, CALM)
    world.run()
    assert ready_rooms(world) == set(range(1, 25))
    assert all(closed.ok for p in world.prefills for closed in p.closed.values())
    sent = sum(p.sender.bytes_sent for p in world.prefills)
    assert sent == sum(d.receiver.bytes_received for d in world.decodes) > 0


def test_the_world_is_as_bad_as_it_claims():
    """Guards the simulation itself: late writes are met both before and after a fence."""
    landed = dropped = ready = 0
    for seed in range(8):
        world = World(seed, 24, Trouble(write_fails=0.4))
        world.run()
        landed += world.late_landed
        dropped += world.late_dropped
        ready += len(ready_rooms(world))
    assert landed
    assert dropped
    assert ready


@pytest.mark.parametrize(("write_fails", "most"), [(0.05, 0), (0.3, 12)])
def test_a_failed_write_is_made_good_and_its_fence_fails_no_other_room(write_fails, most):
    calm = Trouble(cancel=0, abort=0, absent=0, write_fails=write_fails, link_losses=0)
    world = World(3, 24, calm)
    world.run()
    failed = [o for d in world.decodes for os in d.outcomes.values() for o in os if failure(o)]
    assert len(failed) == 24 - len(ready_rooms(world)) <= most
    assert all("; then a KV write failed" in outcome.message for outcome in failed)
    assert sum(d.receiver.report().retries for d in world.decodes) > len(failed)
