"""Take turns, in the order of rank ids."""

from __future__ import annotations

from collections.abc import Sequence

from core.wire import Incarnation, Int32Array, RankId
from router.policy.base import C, Forgotten, Policies, PolicyContext, Ticket


def make(context: PolicyContext) -> Policies:
    """Each role has its own turns."""
    return Policies(prefill=RoundRobin(), decode=RoundRobin())


class RoundRobin:
    """The rank after the last one that was chosen; ranks may come and go in between."""

    def __init__(self) -> None:
        self._last: RankId | None = None

    def next(self, candidates: Sequence[C]) -> C:
        """Whose turn it is among ``candidates``, which is not empty."""
        ordered = sorted(candidates, key=lambda candidate: candidate.rank)
        last = self._last
        chosen = next((c for c in ordered if last is None or c.rank > last), ordered[0])
        self._last = chosen.rank
        return chosen

    def assign(
        self, candidates: Sequence[C], token_ids: Int32Array, cache_salt: str = ""
    ) -> tuple[C, Ticket]:
        return self.next(candidates), Forgotten()

    def forget(self, life: Incarnation) -> None:
        """Turns go by rank ids, which outlive a life."""
