"""What ``antiphon status`` and ``/metrics`` show: the ranks behind one router, as they are now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cluster.dump import Ask
from cluster.reconcile import Life
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
Lives = Callable[[], Sequence[Life]]


class StatusBoard:
    """Asks ranks over the router's own sessions; keeps nothing but what it last showed.

    A rank that does not answer there is asked what it is doing: it may be stuck in a step. Where
    this router is beside the supervisor, ranks that it has yet to start are shown, too.
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
        self._lives: Lives = tuple
        self._shown: set[tuple[RankId, Role]] = set()
        self._handoffs = HandoffCollector()
        sink.add(self._handoffs)

    def supervised(self, lives: Lives) -> None:
        """From now on show what the supervisor knows of its ranks."""
        self._lives = lives

    async def status(self) -> Json:
        """Readiness, and every rank with its load, pages, transfers and life."""
        lives = {life.rank: life for life in self._lives()}
        members = self._replicas.members()
        asked = (self._rank(m, r, lives.get(m.incarnation.rank)) for m, r in members)
        readiness, found = await asyncio.gather(self._selftest.ready(), asyncio.gather(*asked))
        away = lives.keys() - {member.incarnation.rank for member, _ in members}
        ranks = [*found, *(_away(lives[rank]) for rank in away)]
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

    async def _rank(self, member: Member, replica: Replica | None, life: Life | None) -> Json:
        rank = member.incarnation.rank
        known: Json = {"rank": str(rank), "role": member.role.value, "life": _said(life)}
        if replica is None:
            doubt = life.doubt if life is not None else ""
            reason = doubt or self._replicas.problem(rank)
            known |= {"state": "no session", "reason": reason}
            return {**known, **await self._stuck(member)}
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


def _away(life: Life) -> Json:
    """A rank that routers do not know: not yet, or no longer."""
    known = {"rank": str(life.rank), "role": life.rank.group, "life": _said(life)}
    return {**known, "state": life.phase.value, "reason": ""}


def _said(life: Life | None) -> Json | None:
    if life is None:
        return None
    return {
        "phase": life.phase.value,
        "crashes": life.crashes,
        "problem": life.problem,
        "retry_s": life.retry_s,
    }


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
