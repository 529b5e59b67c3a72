"""Take turns, in the order of rank ids."""

from __future__ import annotations

from collections.abc import Sequence

from core.wire import Int32Array, RankId
from router.policy.base import C


class RoundRobin:
    """The rank after the last one that was chosen; ranks may come and go in between."""

    def __init__(self) -> None:
        self._last: RankId | None = None

    def choose(self, candidates: Sequence[C], token_ids: Int32Array) -> C:
        ordered = sorted(candidates, key=lambda candidate: candidate.rank)
        last = self._last
        chosen = next((c for c in ordered if last is None or c.rank > last), ordered[0])
        self._last = chosen.rank
        return chosen
