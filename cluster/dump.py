"""What ``antiphon dump`` shows: the router's own streams and sessions, and what every rank does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from core.dump import RankDump
from core.errors import RankLost, RequestError
from core.rpc.client import ask_dump
from core.wire import Incarnation
from router.echo import quoted
from router.live import LiveStreams
from router.replicas import Member, Replica, Replicas

Ask = Callable[[Incarnation], Awaitable[RankDump]]
Json = dict[str, Any]  # opaque: JSON


class DumpBoard:
    """Asks every rank by itself, not over its session: one that hangs has lost that."""

    def __init__(self, live: LiveStreams, replicas: Replicas, ask: Ask = ask_dump) -> None:
        self._live = live
        self._replicas = replicas
        self._ask = ask

    async def dump(self, rank: str | None = None) -> Json:
        """Of the rank with this name, or of all. Raises RequestError for a name nobody has."""
        members = self._replicas.members()
        wanted = [m for m, _ in members if rank in (None, str(m.incarnation.rank))]
        if rank is not None and not wanted:
            known = ", ".join(str(m.incarnation.rank) for m, _ in members)
            raise RequestError(f"no rank {quoted(rank)}: there are {known or 'none'}", param="rank")
        return {
            "streams": msgspec.to_builtins(self._live.views()),
            "sessions": [_session(member, replica) for member, replica in members],
            "ranks": await asyncio.gather(*map(self._rank, wanted)),
        }

    async def _rank(self, member: Member) -> Json:
        name = str(member.incarnation.rank)
        try:
            dump = await self._ask(member.incarnation)
        except RankLost as error:
            return {"rank": name, "problem": str(error)}
        return {"rank": name, "problem": "", "dump": msgspec.to_builtins(dump)}


def _session(member: Member, replica: Replica | None) -> Json:
    return {
        "rank": str(member.incarnation.rank),
        "role": member.role.value,
        "state": member.state.value,
        "incarnation": str(member.incarnation),
        "up": replica is not None,
        "outstanding_requests": replica.outstanding_requests if replica else 0,
        "outstanding_tokens": replica.outstanding_tokens if replica else 0,
    }
