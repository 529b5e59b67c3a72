"""Ranks without processes: WorkerClients whose chunks are let out one by one by the test.

Every token of an output is known from its prompt and offset, so a test can tell a gap, a repeat
or a wrong restart. ``Fleet.connect`` is what Replicas connects with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from random import Random

from core import wire
from core.errors import RankLost
from core.handoffs import HandoffReport
from router.replicas import Member
from tests.support.wires import incarnation, rank_info, rank_status


def token_at(prompt: Iterable[int], offset: int) -> int:
    """The reference: what a model would say at this offset of this prompt's output."""
    return (7 * sum(prompt) + 13 * offset) % 1009


class FakeLeg:
    """One request on one rank: chunks still to come, and those on their way."""

    def __init__(self, request: wire.TokenRequest, plan: list[wire.TokenChunk]) -> None:
        self.request = request
        self.plan = plan
        self.arrived: asyncio.Queue[wire.TokenChunk | None] = asyncio.Queue()

    def release(self) -> None:
        self.arrived.put_nowait(self.plan.pop(0))

    def error(self, kind: wire.ErrorKind) -> wire.TokenChunk:
        message = wire.StreamError(kind=kind, message="as the test wanted")
        return wire.TokenChunk(
            rid=self.request.rid, offset=0, finish=wire.FinishReason.ERROR, error=message
        )


class FakeClient:
    """One session with one fake rank."""

    def __init__(self, fleet: Fleet, member: Member, on_lost: Callable[[], None]) -> None:
        self.incarnation = member.incarnation
        self.info = rank_info(member.incarnation, member.role)
        self.load = wire.LoadReport()
        self.transfers: HandoffReport | None = None
        self.alive = True
        self.lost = ""
        self.legs: list[FakeLeg] = []
        self.aborted: list[str] = []
        self.done: list[str] = []  # of those, where nothing went wrong
        self._fleet = fleet
        self._role = member.role
        self._on_lost = on_lost

    async def stream(self, request: wire.TokenRequest) -> AsyncIterator[wire.TokenChunk]:
        if not self.alive:
            raise RankLost("gone")
        leg = FakeLeg(request, self._fleet.plan(self._role, request))
        self.legs.append(leg)
        ended = False
        try:
            while not ended:
                chunk = await leg.arrived.get()
                if chunk is None:
                    raise RankLost(f"{self.incarnation.rank} is lost")
                ended = chunk.last or chunk.finish is not None
                yield chunk
        finally:
            self.legs.remove(leg)
            if not ended and request.rid not in self.aborted:
                self.abort(request.rid)

    def abort(self, rid: str, *, done: bool = False) -> None:
        self.aborted.append(rid)
        self.done += [rid] if done else []

    async def status(self) -> wire.RankStatus:
        return rank_status(self.info)

    async def close(self) -> None:
        self._end()

    def lose(self, reason: str = "as the test wanted") -> None:
        self._end(reason)
        self._on_lost()

    def _end(self, reason: str = "as the test wanted") -> None:
        self.alive = False
        self.lost = self.lost or reason
        for leg in self.legs:
            leg.arrived.put_nowait(None)


class Fleet:
    """All fake ranks of a test."""

    def __init__(
        self,
        random: Random | None = None,
        *,
        stop_after: int | None = None,
        local: Callable[[], bool] = lambda: False,
    ) -> None:
        self.random = random or Random(0)
        self.local = local  # drawn for each request: does the decode rank compute the prompt?
        self._locals: dict[str, bool] = {}
        self.stop_after = stop_after  # outputs end with STOP after so many tokens
        self.members: list[Member] = []
        self.clients: list[FakeClient] = []  # every session there ever was
        self.down: set[wire.RankId] = set()
        self.attempts = 0

    def add(self, role: wire.Role, replica: int = 0, nonce: str = "n0") -> Member:
        life = incarnation(role.value, replica, nonce=nonce)
        member = Member(life, role)
        self.members = [m for m in self.members if m.incarnation.rank != life.rank] + [member]
        return member

    async def connect(self, life: wire.Incarnation, on_lost: Callable[[], None]) -> FakeClient:
        self.attempts += 1
        await asyncio.sleep(0)
        if life.rank in self.down:
            raise RankLost("nobody there")
        member = next(m for m in self.members if m.incarnation == life)
        client = FakeClient(self, member, on_lost)
        self.clients.append(client)
        return client

    @property
    def live(self) -> list[FakeClient]:
        return [client for client in self.clients if client.alive]

    def client(self, role: wire.Role, replica: int = 0) -> FakeClient:
        rank = wire.RankId(group=role.value, replica=replica)
        return next(c for c in self.live if c.incarnation.rank == rank)

    def waiting_legs(self) -> list[FakeLeg]:
        return [leg for client in self.live for leg in client.legs if leg.plan]

    def lose(self, client: FakeClient) -> None:
        """End a session; decode legs that wait for its KV will say so."""
        for leg in [leg for other in self.live for leg in other.legs]:
            route = leg.request.route
            waits = not self._locals.get(leg.request.rid)
            if not route.unified and route.prefill == client.incarnation and leg.plan and waits:
                leg.plan[:] = [leg.error(wire.ErrorKind.UNAVAILABLE)]
        client.lose()

    def plan(self, role: wire.Role, request: wire.TokenRequest) -> list[wire.TokenChunk]:
        """What an honest rank would send."""
        ids = request.ids().tolist()
        prompt, start = ids[: request.prompt_len], len(ids) - request.prompt_len
        assert ids[request.prompt_len :] == [token_at(prompt, o) for o in range(start)]
        limit = request.params.max_new_tokens
        stop = self.stop_after
        end, finish = limit, wire.FinishReason.LENGTH
        if stop is not None and stop <= limit:
            end, finish = stop, wire.FinishReason.STOP
        assert start < end, "the output was over already"
        local = limit - start > 1 and self._locals.setdefault(request.rid, self.local())
        begin = start + (role is wire.Role.DECODE and not local)
        usage = wire.Usage(prompt_tokens=len(ids), cached_tokens=2)

        def chunk(
            first: int, after: int, *, last: bool = False, over: bool = False
        ) -> wire.TokenChunk:
            return wire.TokenChunk(
                rid=request.rid,
                offset=first,
                token_ids=tuple(token_at(prompt, o) for o in range(first, after)),
                finish=finish if over else None,
                last=last or over,
                usage=usage if first == begin else None,
            )

        if role is wire.Role.PREFILL and local:
            return [wire.TokenChunk(rid=request.rid, offset=start, last=True)]
        if role is wire.Role.PREFILL:
            return [chunk(start, start + 1, last=True, over=start + 1 == end)]
        chunks, at = [], begin
        if at == end:
            return [chunk(at, at, last=True)]
        while at < end:
            after = min(end, at + self.random.randint(1, 3))
            repeated = self.random.randint(0, min(1, at - begin))
            chunks.append(chunk(at - repeated, after, over=after == end))
            at = after
        return chunks
