"""The ranks this router knows: who is a member, which session is up, what is booked on it.

Members come from the cluster. For each one a task keeps a session: it connects, waits for the
loss, and tries again with a growing pause for as long as the rank is a member. A rank whose
session is lost is out at once; what comes back is another Replica with nothing booked on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from core.errors import AntiphonError, RankLost
from core.ports import WorkerClient
from core.rpc.link import in_order
from core.wire import Incarnation, LoadReport, RankId, Role

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.2


class MemberState(StrEnum):
    """Whether routers may send a member new requests."""

    JOINING = "joining"  # only the request that tests it
    SERVING = "serving"
    DRAINING = "draining"  # it finishes what it has


@dataclass(frozen=True, slots=True)
class Member:
    """One life of a rank, as the cluster announces it."""

    incarnation: Incarnation
    role: Role
    state: MemberState = MemberState.SERVING


@dataclass(frozen=True, slots=True)
class Retry:
    """Pause after a failed or lost session: doubles up to the limit. Seconds."""

    first_s: float = 0.1
    limit_s: float = 2.0


class Connect(Protocol):
    """Opens a session. Raises RankLost; calls ``on_lost`` once when the session ends by itself."""

    def __call__(
        self, incarnation: Incarnation, on_lost: Callable[[], None]
    ) -> Awaitable[WorkerClient]: ...


class Booking:
    """Tokens held on a replica until released, once."""

    def __init__(self, replica: Replica, tokens: int) -> None:
        self._replica: Replica | None = replica
        self._tokens = tokens
        replica.outstanding_tokens += tokens
        replica.outstanding_requests += 1

    def release(self) -> None:
        if self._replica is not None:
            self._replica.outstanding_tokens -= self._tokens
            self._replica.outstanding_requests -= 1
            self._replica = None


class Replica:
    """One live session and what this router has booked on it; a policy's Candidate."""

    def __init__(self, client: WorkerClient, role: Role) -> None:
        self.client = client
        self.role = role
        self.outstanding_tokens = 0
        self.outstanding_requests = 0

    @property
    def rank(self) -> RankId:
        return self.client.incarnation.rank

    @property
    def incarnation(self) -> Incarnation:
        return self.client.incarnation

    @property
    def capacity_tokens(self) -> int:
        info = self.client.info
        return info.total_pages * info.page_size

    @property
    def load(self) -> LoadReport:
        return self.client.load

    def book(self, tokens: int) -> Booking:
        """Hold ``tokens`` of work until the booking is released."""
        return Booking(self, tokens)


class Replicas:
    """Made and used on one event loop; ``close`` ends every session."""

    def __init__(self, connect: Connect, *, retry: Retry = Retry()) -> None:
        self._connect = connect
        self._retry = retry
        self._members: dict[RankId, Member] = {}
        self._keepers: dict[RankId, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._up: dict[RankId, Replica] = {}
        self._problems: dict[RankId, str] = {}  # of members without a session: why there is none
        self._changed = asyncio.Event()
        self._when_gone: list[Callable[[Incarnation], None]] = []

    # --- membership ----------------------------------------

    def update(self, members: Iterable[Member]) -> None:
        """The whole truth about who is there; sessions follow in the background.

        A rank that is gone or has another incarnation loses its session at once.
        """
        wanted = {member.incarnation.rank: member for member in members}
        for rank, member in list(self._members.items()):
            other = wanted.get(rank)
            if other is None or other.incarnation != member.incarnation:
                self._drop(rank)
        for rank, member in wanted.items():
            known = rank in self._members
            self._members[rank] = member
            if not known:
                keeper = self._keepers[rank] = asyncio.create_task(self._keep(member))
                keeper.add_done_callback(_complain)
        self._tell()

    async def close(self) -> None:
        """End all sessions and wait until they are gone."""
        for rank in list(self._members):
            self._drop(rank)
        await asyncio.gather(*self._leaving, return_exceptions=True)

    # --- what the dispatcher and the front door ask ----------------------------------------

    @property
    def any_member(self) -> bool:
        """Is anybody announced, whether reachable or not?"""
        return bool(self._members)

    @property
    def complete(self) -> bool:
        """Can a request be routed now: a unified rank, or one of each other role?"""
        return bool(
            self.routable(Role.UNIFIED)
            or (self.routable(Role.PREFILL) and self.routable(Role.DECODE))
        )

    def routable(self, role: Role, avoid: AbstractSet[RankId] = frozenset()) -> list[Replica]:
        """Live serving replicas of a role, without those to avoid unless nothing else is left."""
        live = self.live(role, MemberState.SERVING)
        return [r for r in live if r.rank not in avoid] or live

    def live(self, role: Role, state: MemberState) -> list[Replica]:
        """Replicas of a role in one state whose session is up."""
        return [
            r
            for rank, r in self._up.items()
            if r.role is role and r.client.alive and self._members[rank].state is state
        ]

    async def idle(self, rank: RankId) -> None:
        """Wait until a rank has no request left, of this router or of others; or is gone."""
        while (replica := self._up.get(rank)) is not None:
            if not replica.outstanding_requests:
                try:
                    load = (await replica.client.status()).load
                except RankLost:
                    return
                if load.idle:
                    return
            await asyncio.sleep(IDLE_POLL_S)

    def members(self) -> list[tuple[Member, Replica | None]]:
        """Every announced member and its session, None while there is none; for status pages."""
        return [(member, self._up.get(rank)) for rank, member in self._members.items()]

    def problem(self, rank: RankId) -> str:
        """Why there is no session with a member; empty where there is one, or nothing is known."""
        return self._problems.get(rank, "")

    def change(self) -> asyncio.Event:
        """The event that is set at the next change of members or sessions. Take it, then look."""
        return self._changed

    def when_gone(self, tell: Callable[[Incarnation], None]) -> None:
        """Call ``tell`` for each life of a rank that is over. A lost session is not the end of it:
        the rank may be reached again, with its cache.
        """
        self._when_gone.append(tell)

    # --- sessions ----------------------------------------

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _drop(self, rank: RankId) -> None:
        life = self._members.pop(rank).incarnation
        self._up.pop(rank, None)
        self._problems.pop(rank, None)
        keeper = self._keepers.pop(rank)
        self._leaving.add(keeper)
        keeper.add_done_callback(self._leaving.discard)
        keeper.cancel()
        for tell in self._when_gone:
            tell(life)

    async def _keep(self, member: Member) -> None:
        pause_s = self._retry.first_s
        while True:
            if await self._session(member):
                pause_s = self._retry.first_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._retry.limit_s)

    async def _session(self, member: Member) -> bool:
        """One session from its start to its loss; False where it never started."""
        rank = member.incarnation.rank
        lost = asyncio.Event()
        try:
            client = await self._connect(member.incarnation, lost.set)
        except AntiphonError as error:
            log.info("no session with %s: %s", rank, error)
            self._problems[rank] = str(error)
            return False
        try:
            self._up[rank] = Replica(client, member.role)
            self._problems.pop(rank, None)
            log.info("session with %s is up", member.incarnation)
            self._tell()
            await lost.wait()
            draining = self._members[rank].state is MemberState.DRAINING
            expected = draining or in_order(client.lost)
            log.log(
                logging.INFO if expected else logging.WARNING,
                "session with %s is lost: %s",
                member.incarnation,
                client.lost,
            )
            del self._up[rank]
            self._problems[rank] = client.lost
            self._tell()
        finally:
            await client.close()
        return True


def _complain(keeper: asyncio.Task[None]) -> None:
    """A keeper ends by cancellation only; anything else is a defect that must be seen."""
    if not keeper.cancelled() and (error := keeper.exception()):
        log.error("a member is no longer connected to", exc_info=error)
