"""Where an output is written: the fullest KV pools are avoided, a known prefix breaks near ties.

Reserved tokens count, not requests: a decode step reads the KV of everything it serves, and a pool
that runs full puts sequences back. A prefix that is there already need not be transferred.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.block_hash import BLOCK_TOKENS, block_hashes
from core.clock import Clock
from core.wire import Incarnation, Int32Array
from router.policy.base import C, Candidate, PolicyContext, Ticket
from router.policy.round_robin import RoundRobin
from router.prefix_index import PrefixIndex, QueuedPrefix
from router.prefix_shelf import Shelf

NEAR = 0.05  # of a pool: loads this close are equal for a request whose prefix is held


class DecodeLoad:
    """For decode ranks."""

    def __init__(self, context: PolicyContext, index: PrefixIndex) -> None:
        self._clock = context.clock
        self._index = index
        self._turns = RoundRobin()

    def assign(
        self, candidates: Sequence[C], token_ids: Int32Array, cache_salt: str = ""
    ) -> tuple[C, Ticket]:
        hashes = block_hashes(token_ids, cache_salt)
        held = self._index.match(hashes)
        shelves = {c.incarnation: self._shelf(c) for c in candidates}
        least = min(_fill(c) for c in candidates)

        def order(candidate: C) -> tuple[int, float, int]:
            fill = _fill(candidate)
            known = held.get(shelves[candidate.incarnation], 0) if fill <= least + NEAR else 0
            return (-known, fill, candidate.outstanding_requests)

        best = min(order(c) for c in candidates)
        chosen = self._turns.next([c for c in candidates if order(c) == best])
        prefix = QueuedPrefix(self._index, shelves[chosen.incarnation], hashes, cache_salt)
        return chosen, _Ticket(prefix, self._clock)

    def forget(self, life: Incarnation) -> None:
        self._index.forget(life)

    def _shelf(self, candidate: Candidate) -> Shelf:
        return self._index.shelf(candidate.incarnation, candidate.capacity_tokens // BLOCK_TOKENS)


def _fill(candidate: Candidate) -> float:
    """Share of the KV pool that is spoken for: our own reservations, or, where it is more, what the
    rank itself says is in use, which includes other routers' requests.
    """
    report = candidate.load
    used = report.total_pages - report.free_pages - report.cached_pages
    reported = used / report.total_pages if report.total_pages else 0.0
    return max(candidate.outstanding_tokens / candidate.capacity_tokens, reported)


class _Ticket:
    """Implements router.policy.base.Ticket."""

    def __init__(self, prefix: QueuedPrefix, clock: Clock) -> None:
        self._prefix = prefix
        self._clock = clock

    @property
    def expected_tokens(self) -> int | None:
        return None

    def started(self, cached_tokens: int | None) -> None:
        self._prefix.computed(self._clock.now())

    def ended(self, token_ids: Int32Array | None) -> None:
        kept = None if token_ids is None else token_ids[:-1]
        self._prefix.ended(kept, self._clock.now())
