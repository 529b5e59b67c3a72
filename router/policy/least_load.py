"""Fewest outstanding tokens."""

from __future__ import annotations

from collections.abc import Sequence

from core.wire import Incarnation, Int32Array
from router.policy.base import C, Candidate, Forgotten, Policies, PolicyContext, Ticket
from router.policy.round_robin import RoundRobin


def make(context: PolicyContext) -> Policies:
    """The same rule for both roles, with turns of their own."""
    return Policies(prefill=LeastLoad(), decode=LeastLoad())


class LeastLoad:
    """By what is booked here, then by what ranks say of themselves, then by turn.

    Tokens, not requests: one long prompt is more work than many short ones. Our own bookings come
    first, because reports are late: everything sent since the last one would be forgotten.
    """

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def assign(
        self, candidates: Sequence[C], token_ids: Int32Array, cache_salt: str = ""
    ) -> tuple[C, Ticket]:
        least = min(_load(candidate) for candidate in candidates)
        ties = [candidate for candidate in candidates if _load(candidate) == least]
        return self._turns.next(ties), Forgotten()

    def forget(self, life: Incarnation) -> None:
        """Bookings live on the replicas."""


def _load(candidate: Candidate) -> tuple[int, int, int]:
    report = candidate.load
    requests = report.waiting_requests + report.running_requests + report.handoff_requests
    return (candidate.outstanding_tokens, report.waiting_tokens, requests)
