"""What ``antiphon status`` and ``/metrics`` show: the ranks behind one router, as they are now."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from core.errors import RankLost
from core.metrics import PrometheusSink, forget_rank, record_load
from core.wire import RankId, Role
from router.replicas import Member, Replica, Replicas
from router.selftest import SelfTest


class StatusBoard:
    """Asks ranks over the router's own sessions; keeps nothing but what it last showed."""

    def __init__(
        self, model: str, replicas: Replicas, selftest: SelfTest, sink: PrometheusSink
    ) -> None:
        self._model = model
        self._replicas = replicas
        self._selftest = selftest
        self._sink = sink
        self._shown: set[tuple[RankId, Role]] = set()

    async def status(self) -> dict[str, Any]:  # opaque: the JSON of GET /status
        """Readiness, and every announced rank with its load, pages and transfers."""
        readiness = await self._selftest.ready()
        ranks = await asyncio.gather(*(_rank(m, r) for m, r in self._replicas.members()))
        return {
            "model": self._model,
            "ready": readiness.ready,
            "reason": readiness.reason,
            "ranks": sorted(ranks, key=lambda rank: str(rank["rank"])),
        }

    def metrics(self) -> bytes:
        """The Prometheus page; ranks that left are no longer on it."""
        live = {(m.incarnation.rank, m.role): r for m, r in self._replicas.members() if r}
        for rank, role in self._shown - live.keys():
            forget_rank(self._sink, rank, role)
        for (rank, role), replica in live.items():
            record_load(self._sink, rank, role, replica.load)
        self._shown = set(live)
        return self._sink.render()


async def _rank(member: Member, replica: Replica | None) -> dict[str, Any]:  # opaque: JSON
    known = {"rank": str(member.incarnation.rank), "role": member.role.value}
    if replica is None:
        return {**known, "state": "no session"}
    try:
        status = await replica.client.status()
    except RankLost as error:
        return {**known, "state": "lost", "reason": str(error)}
    body: dict[str, Any] = msgspec.to_builtins(status)
    return {**known, "state": "up", "outstanding": replica.outstanding_requests, **body}
