"""A dispatcher over fake ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from core.tracing.tracer import Tracer
from core.wire import Role, SamplingParams, TokenChunk
from router.dispatch import Dispatcher, DispatchLimits
from router.policy.base import Policies
from router.policy.least_load import LeastLoad
from router.replicas import Replica, Replicas, Retry
from tests.support.eventually import eventually
from tests.support.fake_ranks import Fleet

PROMPT = [3, 1, 4, 1, 5]


class Front:
    """A dispatcher over a fleet, and every replica it ever had."""

    def __init__(
        self,
        fleet: Fleet,
        reroute_wait_s: float,
        policies: Policies | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.fleet = fleet
        self.replicas = Replicas(fleet.connect, retry=Retry(first_s=0.0, limit_s=0.0))
        self.ever: set[Replica] = set()
        limits = DispatchLimits(reroute_wait_s=reroute_wait_s, max_reroutes=3)
        chosen = policies or Policies(LeastLoad(), LeastLoad())
        self.dispatcher = Dispatcher(self.replicas, *chosen, limits=limits, tracer=tracer)

    def remember(self) -> None:
        self.ever |= {replica for _, replica in self.replicas.members() if replica}

    async def collect(
        self,
        max_new: int,
        rid: str = "r",
        prompt: Sequence[int] = PROMPT,
        salt: str = "",
        trace: str = "",
    ) -> list[TokenChunk]:
        params = SamplingParams(max_new_tokens=max_new)
        wanted = self.dispatcher.stream(rid, prompt, params, salt, trace=trace)
        async with aclosing(wanted) as stream:
            return [chunk async for chunk in stream]

    def check_idle(self) -> None:
        assert all(r.outstanding_tokens == r.outstanding_requests == 0 for r in self.ever)
        assert not any(client.legs for client in self.fleet.clients)


@asynccontextmanager
async def front(
    *roles: Role,
    fleet: Fleet | None = None,
    wait_s: float = 5.0,
    policies: Policies | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[Front]:
    """A dispatcher whose ranks are up; at the end nothing may be booked or running."""
    fleet = fleet or Fleet()
    for role in roles:
        fleet.add(role, sum(m.role is role for m in fleet.members))
    it = Front(fleet, wait_s, policies, tracer)
    it.replicas.update(fleet.members)
    if roles:
        await eventually(lambda: len(fleet.live) == len(roles))
        await settle()
    it.remember()
    try:
        yield it
        it.check_idle()
    finally:
        await it.replicas.close()


async def settle() -> None:
    """Let everything that can run without another chunk do so."""
    for _ in range(12):
        await asyncio.sleep(0)


async def release_all(fleet: Fleet) -> None:
    """Let every chunk out, in order."""
    while legs := fleet.waiting_legs():
        legs[0].release()
        await settle()


def tokens(chunks: list[TokenChunk]) -> list[int]:
    """The output, after checking that offsets leave no gap and the reason comes last."""
    found: list[int] = []
    for chunk in chunks:
        assert chunk.offset == len(found)
        assert chunk.rid == "r"
        found.extend(chunk.token_ids)
    assert [c.finish is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    return found
