"""Dispatcher and cache_aware together: whatever happens, no work and no pin is left."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from core.block_hash import BLOCK_TOKENS, block_hashes
from core.clock import VirtualClock
from core.config import CacheAwareConfig
from core.metrics import PrometheusSink
from core.wire import ErrorKind, FinishReason, Role, pack_ids, unpack_ids
from router.policy.base import PolicyContext
from router.policy.cache_aware import CacheAware, make
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_ranks import Fleet, token_at
from tests.support.fronts import front, release_all, settle, tokens

LONG = [n % 7 for n in range(3 * BLOCK_TOKENS)]
PAIR = (Role.PREFILL, Role.DECODE)


class Watched:
    """The policies of a test, and what they must have given back."""

    def __init__(self) -> None:
        self.sink = PrometheusSink()
        self.policies = make(PolicyContext(CacheAwareConfig(), VirtualClock(), self.sink))
        assert isinstance(self.policies.prefill, CacheAware)
        self.prefill = self.policies.prefill
        self.index = self.prefill._index

    def held(self, ids, salt="") -> dict[str, int]:
        hashes = block_hashes(unpack_ids(pack_ids(ids)), salt)
        return {str(s.owner.rank): n for s, n in self.index.match(hashes).items()}

    def check_idle(self) -> None:
        self.index.check()
        assert all(shelf.pinned == 0 for shelf in self.index._shelves.values())
        for rank in self.prefill._ranks.values():
            assert (rank.queue.active, rank.queue.tokens, rank.queue._work) == (0, 0, 0.0)


def run(scenario, *roles, fleet=None):
    watched = Watched()

    async def main() -> None:
        async with front(*roles, fleet=fleet, policies=watched.policies) as it:
            await scenario(it, watched)
            await settle()
            watched.check_idle()

    run_tidy(main)
    watched.check_idle()
    assert not watched.index._shelves, "every rank left"
    assert not watched.index._runs


@pytest.mark.parametrize("roles", [PAIR, (Role.UNIFIED,)])
def test_prompt_and_output_are_learned_where_they_were_computed(roles):
    async def scenario(it, watched) -> None:
        task = asyncio.create_task(it.collect(20, prompt=LONG))
        await settle()
        prefill = f"{roles[0].value}/0/0"
        decode = f"{roles[-1].value}/0/0"
        assert watched.held(LONG) == {prefill: 3, decode: 3}  # queued, and pinned
        await release_all(it.fleet)
        assert len(tokens(await task)) == 20
        whole = LONG + [token_at(LONG, offset) for offset in range(20)]
        assert watched.held(whole)[decode] == 4
        if len(roles) == 2:
            assert watched.held(whole)[prefill] == 3  # the output is never there

    run(scenario, *roles)


def test_a_prompt_is_learned_under_its_salt():
    async def scenario(it, watched) -> None:
        task = asyncio.create_task(it.collect(2, prompt=LONG, salt="mine"))
        await settle()
        await release_all(it.fleet)
        await task
        assert (watched.held(LONG, "mine"), watched.held(LONG)) == ({"unified/0/0": 3}, {})

    run(scenario, Role.UNIFIED)


def test_the_next_turn_goes_to_the_rank_that_has_the_first():
    async def scenario(it, watched) -> None:
        first = asyncio.create_task(it.collect(2, prompt=LONG))
        await settle()
        (busy,) = (c for c in it.fleet.live if c.legs)
        await release_all(it.fleet)
        await first
        for _ in range(3):
            again = asyncio.create_task(it.collect(2, prompt=[*LONG, 1, 2, 3]))
            await settle()
            assert len(busy.legs) == 1
            await release_all(it.fleet)
            await again
        shown = watched.sink.render().decode()
        assert 'antiphon_routing_decisions_total{reason="cached"} 3.0' in shown
        assert "antiphon_predicted_cached_tokens_total 144.0" in shown

    run(scenario, Role.UNIFIED, Role.UNIFIED, Role.UNIFIED)


@pytest.mark.parametrize("roles", [PAIR, (Role.UNIFIED,)])
@pytest.mark.parametrize("after_first_token", [False, True])
def test_a_caller_that_leaves_leaves_nothing_behind(roles, after_first_token):
    async def scenario(it, watched) -> None:
        task = asyncio.create_task(it.collect(5, prompt=LONG))
        await settle()
        if after_first_token:
            it.fleet.client(roles[0]).legs[0].release()
            await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        expected = 3 if after_first_token else 0
        assert set(watched.held(LONG).values()) == ({expected} if expected else set())

    run(scenario, *roles)


@pytest.mark.parametrize("role", PAIR)
def test_an_error_leaves_nothing_behind(role):
    async def scenario(it, watched) -> None:
        task = asyncio.create_task(it.collect(5, prompt=LONG))
        await settle()
        leg = it.fleet.client(role).legs[0]
        leg.arrived.put_nowait(leg.error(ErrorKind.INVALID))
        (end,) = await task
        assert end.finish is FinishReason.ERROR
        assert watched.held(LONG) == {}

    run(scenario, *PAIR)


def test_a_lost_session_keeps_the_cache_and_a_lost_life_does_not():
    async def scenario(it, watched) -> None:
        task = asyncio.create_task(it.collect(3, prompt=LONG))
        await settle()
        await release_all(it.fleet)
        await task
        assert watched.held(LONG) == {"unified/0/0": 3}
        it.fleet.live[0].lose()
        await eventually(lambda: it.fleet.live)
        assert watched.held(LONG) == {"unified/0/0": 3}
        it.fleet.add(Role.UNIFIED, 0, nonce="n1")
        it.replicas.update(it.fleet.members)
        assert watched.held(LONG) == {}

    run(scenario, Role.UNIFIED)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    counts=st.sampled_from([(1, 1, 0), (2, 3, 0), (0, 0, 3)]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    losses=st.integers(0, 5),
)
def test_any_way_out_gives_everything_back(seed, counts, lengths, losses):
    roles = [r for role, n in zip((*PAIR, Role.UNIFIED), counts, strict=True) for r in [role] * n]
    random = Random(seed)
    fleet = Fleet(random)

    async def scenario(it, watched) -> None:
        prompts = [LONG[: random.randint(1, len(LONG))] for _ in lengths]
        tasks = [
            asyncio.create_task(it.collect(n, prompt=prompt))
            for n, prompt in zip(lengths, prompts, strict=True)
        ]
        left = losses
        await settle()
        while not all(task.done() for task in tasks):
            legs = fleet.waiting_legs()
            if left and fleet.live and random.random() < 0.2:
                left -= 1
                victim = random.choice(fleet.live)
                fleet.lose(victim)
                if random.random() < 0.5:  # restarted, not only cut off
                    life = victim.incarnation
                    fleet.add(victim.info.role, life.rank.replica, nonce=f"n{left}x")
                    it.replicas.update(fleet.members)
            elif random.random() < 0.05:
                random.choice(tasks).cancel()
            elif legs:
                random.choice(legs).release()
            await settle()
            it.remember()
            watched.index.check()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario, *roles, fleet=fleet)
