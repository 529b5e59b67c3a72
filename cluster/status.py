"""What ``antiphon status`` and ``/metrics`` show: the ranks behind one router, as they are now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from cluster.dump import Ask
from core.dump import format_busy
from core.errors import RankLost
from core.handoff_metrics import HandoffCollector
from core.metrics import PrometheusSink, forget_rank, record_load
from core.rpc.client import ask_dump
from core.wire import RankId, RankInfo, Role
from router.readiness import Readiness
from router.replicas import Member, Replica, Replicas
from router.selftest import SelfTest

STUCK_S = 1.0  # a rank that is in a step for this long and answers nobody is called stuck

Json = dict[str, Any]  # opaque: JSON


class StatusBoard:
    """Asks ranks over the router's own sessions; keeps nothing but what it last showed.

    A rank that does not answer there is asked what it is doing: it may be stuck in a step.
    """

    def __init__(
        self,
        model: str,
        replicas: Replicas,
        selftest: SelfTest,
        sink: PrometheusSink,
        ask: Ask = ask_dump,
    ) -> None:
        self._model = model
        self._replicas = replicas
        self._selftest = selftest
        self._sink = sink
        self._ask = ask
        self._shown: set[tuple[RankId, Role]] = set()
        self._handoffs = HandoffCollector()
        sink.add(self._handoffs)

    async def status(self) -> Json:
        """Readiness, and every announced rank with its load, pages and transfers."""
        asked = (self._rank(m, r) for m, r in self._replicas.members())
        readiness, ranks = await asyncio.gather(self._selftest.ready(), asyncio.gather(*asked))
        infos = [replica.client.info for _, replica in self._replicas.members() if replica]
        return {
            "model": self._model,
            "ready": readiness.ready,
            "reason": readiness.reason,
            "serving": serving(infos, readiness),
            "ranks": sorted(ranks, key=lambda rank: str(rank["rank"])),
        }

    def metrics(self) -> bytes:
        """The Prometheus page; ranks that left are no longer on it."""
        live = {(m.incarnation.rank, m.role): r for m, r in self._replicas.members() if r}
        for rank, role in self._shown - live.keys():
            forget_rank(self._sink, rank, role)
        for (rank, role), replica in live.items():
            record_load(self._sink, rank, role, replica.load)
        reports = {key: replica.client.transfers for key, replica in live.items()}
        self._handoffs.show({key: report for key, report in reports.items() if report})
        self._shown = set(live)
        return self._sink.render()

    async def _rank(self, member: Member, replica: Replica | None) -> Json:
        known = {"rank": str(member.incarnation.rank), "role": member.role.value}
        if replica is None:
            return {**known, "state": "no session", **await self._stuck(member)}
        try:
            status = await replica.client.status()
        except RankLost as error:
            return {**known, "state": "lost", "reason": str(error), **await self._stuck(member)}
        body: Json = msgspec.to_builtins(status)
        return {**known, "state": "up", "outstanding": replica.outstanding_requests, **body}

    async def _stuck(self, member: Member) -> Json:
        """What a rank that does not step is stuck in; empty where it is not."""
        try:
            busy = (await self._ask(member.incarnation)).busy
        except RankLost:
            return {}
        if busy is None or busy.for_s < STUCK_S:
            return {}
        return {"state": "stuck", "stuck_s": busy.for_s, "reason": format_busy(busy)}


def serving(infos: Sequence[RankInfo], readiness: Readiness) -> str:
    """How requests are served now, and where prefill and decode are apart, whether KV crosses.

    A ready router has seen it cross: in the self-test of each new pair.
    """
    roles = {info.role for info in infos}
    if Role.UNIFIED in roles:
        return "unified: each rank reads prompts and writes answers"
    if not {Role.PREFILL, Role.DECODE} <= roles:
        missing = sorted({Role.PREFILL.value, Role.DECODE.value} - {role.value for role in roles})
        return f"prefill/decode, not in effect: no {' and no '.join(missing)} rank is there"
    if not readiness.ready:
        return f"prefill/decode, not in effect: {readiness.reason}"
    ways = sorted({info.transport for info in infos if info.transport})
    return f"prefill/decode over {' and '.join(ways)}"
