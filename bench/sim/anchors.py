"""How other routers decide, written from the description of their rules, as Policies to compare.

They get what their originals have: a view of each rank's cache that is fed by their own decisions
and never learns what the rank has evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from core.wire import Incarnation, Int32Array
from router.policy.base import C, Forgotten, Ticket
from worker.cache.radix import RadixTree


class LeastRequests:
    """Fewest requests in flight, drawn by lot among equals."""

    def __init__(self) -> None:
        self._lot = Random(0)

    def assign(
        self, candidates: Sequence[C], token_ids: Int32Array, cache_salt: str = ""
    ) -> tuple[C, Ticket]:
        least = min(c.outstanding_requests for c in candidates)
        ties = [c for c in candidates if c.outstanding_requests == least]
        return self._lot.choice(ties), Forgotten()

    def forget(self, life: Incarnation) -> None:
        pass


class Views:
    """One unbounded tree for each rank."""

    def __init__(self) -> None:
        self._trees: dict[Incarnation, RadixTree] = {}

    def of(self, life: Incarnation) -> RadixTree:
        return self._trees.setdefault(life, RadixTree())


class Threshold:
    """sglang's cache_aware: the longest match where it is long enough, unless counts of requests
    have drifted too far apart; without a match the rank with the smallest tree.
    """

    MATCH = 0.3  # of the prompt
    DRIFT = 64  # requests
    DRIFT_RATIO = 1.5

    def __init__(self) -> None:
        self._views = Views()
        self._lot = Random(0)

    def assign(
        self, candidates: Sequence[C], token_ids: Int32Array, cache_salt: str = ""
    ) -> tuple[C, Ticket]:
        chosen = self._choose(candidates, token_ids)
        self._views.of(chosen.incarnation).insert(token_ids, token_ids)
        return chosen, Forgotten()

    def _choose(self, candidates: Sequence[C], token_ids: Int32Array) -> C:
        counts = [c.outstanding_requests for c in candidates]
        most, least = max(counts), min(counts)
        if most - least > self.DRIFT and most > self.DRIFT_RATIO * least:
            return candidates[counts.index(least)]
        matched = [self._views.of(c.incarnation).peek(token_ids) for c in candidates]
        longest = max(matched)
        if longest > self.MATCH * len(token_ids):
            pairs = zip(candidates, matched, strict=True)
            return self._lot.choice([c for c, length in pairs if length == longest])
        return min(candidates, key=lambda c: self._views.of(c.incarnation).tokens)

    def forget(self, life: Incarnation) -> None:
        pass


class BlockCost:
    """Dynamo's selector with its approximate index: fewest blocks to prefill and to decode."""

    BLOCK = 64  # tokens

    def __init__(self) -> None:
        self._views = Views()
        self._lot = Random(0)
        self._prefill: dict[Incarnation, int] = {}  # tokens
        self._decode: dict[Incarnation, int] = {}

    def assign(
        self, candidates: Sequence[C], token_ids: Int32Array, cache_salt: str = ""
    ) -> tuple[C, Ticket]:
        size = len(token_ids)
        new = {}
        costs = []
        for candidate in candidates:
            life = candidate.incarnation
            matched = self._views.of(life).peek(token_ids) // self.BLOCK * self.BLOCK
            new[life] = size - matched
            prefill = self._prefill.setdefault(life, 0) + new[life]
            costs.append(prefill + self._decode.setdefault(life, 0) + size)
        least = min(costs)
        ties = [c for c, cost in zip(candidates, costs, strict=True) if cost == least]
        chosen = self._lot.choice(ties)
        life = chosen.incarnation
        self._views.of(life).insert(token_ids, token_ids)
        return chosen, _Blocks(self._prefill, self._decode, life, (new[life], size))

    def forget(self, life: Incarnation) -> None:
        pass


class _Blocks:
    """Prefill load until the first token, decode load until the end."""

    def __init__(
        self,
        prefill: dict[Incarnation, int],
        decode: dict[Incarnation, int],
        life: Incarnation,
        tokens: tuple[int, int],
    ) -> None:
        self._prefill, self._decode, self._life = prefill, decode, life
        self._new, self._size = tokens
        prefill[life] += self._new
        decode[life] += self._size

    @property
    def expected_tokens(self) -> int | None:
        return None

    def started(self, cached_tokens: int | None) -> None:
        self._prefill[self._life] -= self._new

    def ended(self, token_ids: Int32Array | None) -> None:
        self._decode[self._life] -= self._size
