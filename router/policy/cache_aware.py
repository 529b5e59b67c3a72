"""The rank where a prompt costs least, in estimated seconds: wait, own work, what it evicts.

    cost = speed x [ (queued work + own work) x slowdown
                     + own_work_weight x own work       others will wait for it
                     + 96 tokens for each active request
                     + eviction_weight x evicted tokens x e^(-age of the oldest prefix / horizon) ]

One sum instead of thresholds: a holder of the prefix wins while it is cheaper, all holders are
compared, and where none is cheap the cheapest rank is the fall-back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from core import metrics
from core.block_hash import BLOCK_TOKENS, block_hashes
from core.clock import Clock
from core.metrics import MetricSink
from core.wire import Incarnation, Int32Array
from router.policy.base import C, Candidate, Policies, PolicyContext, Ticket
from router.policy.decode_load import DecodeLoad
from router.policy.prefill_work import Prefill, PrefillQueue, Speed, work_of
from router.policy.round_robin import RoundRobin
from router.prefix_index import PrefixIndex, QueuedPrefix
from router.prefix_shelf import Shelf

ACTIVE_REQUEST_TOKENS = 96
TIE = 0.02  # costs this close are equal: estimates are no better


def make(context: PolicyContext) -> Policies:
    """Both roles look into one index."""
    index = PrefixIndex()
    return Policies(prefill=CacheAware(context, index), decode=DecodeLoad(context, index))


@dataclass(slots=True)
class _Rank:
    """What the policy knows of one life of a rank."""

    shelf: Shelf
    queue: PrefillQueue


@dataclass(frozen=True, slots=True)
class _Offer:
    """What it would cost to send the prompt to one rank."""

    rank: _Rank
    cached_tokens: int
    cost: float  # seconds


class CacheAware:
    """For prefill ranks, and for unified ones."""

    def __init__(self, context: PolicyContext, index: PrefixIndex) -> None:
        self._config, self._clock, self._sink = context
        self._index = index
        self._ranks: dict[Incarnation, _Rank] = {}
        self._group = Speed()
        self._turns = RoundRobin()

    def assign(
        self, candidates: Sequence[C], token_ids: Int32Array, cache_salt: str = ""
    ) -> tuple[C, Ticket]:
        now = self._clock.now()
        hashes = block_hashes(token_ids, cache_salt)
        held = self._index.match(hashes)
        offers = [(c, self._offer(c, len(token_ids), held, now)) for c in candidates]
        limit = (1 + TIE) * min(offer.cost for _, offer in offers)
        cheap = [(c, offer) for c, offer in offers if offer.cost <= limit]
        room = min(offer.rank.shelf.held for _, offer in cheap)
        chosen = self._turns.next([c for c, offer in cheap if offer.rank.shelf.held == room])
        offer = next(offer for c, offer in cheap if c is chosen)
        prefix = QueuedPrefix(self._index, offer.rank.shelf, hashes, cache_salt)
        self._count(offer, max(other.cached_tokens for _, other in offers))
        return chosen, self._ticket(offer, token_ids, prefix, now)

    def forget(self, life: Incarnation) -> None:
        self._ranks.pop(life, None)
        self._index.forget(life)

    def _rank(self, candidate: Candidate) -> _Rank:
        life = candidate.incarnation
        if life not in self._ranks:
            shelf = self._index.shelf(life, candidate.capacity_tokens // BLOCK_TOKENS)
            self._ranks[life] = _Rank(shelf, PrefillQueue(self._group))
        return self._ranks[life]

    def _offer(
        self, candidate: Candidate, prompt_tokens: int, held: dict[Shelf, int], now: float
    ) -> _Offer:
        rank = self._rank(candidate)
        queue = rank.queue
        # the last token is always computed: its logits give the first output
        cached = min(held.get(rank.shelf, 0) * BLOCK_TOKENS, prompt_tokens - 1)
        own = work_of(prompt_tokens, cached)
        # what the rank says is waiting beyond our own came from other routers
        others = max(0, candidate.load.waiting_tokens - queue.tokens)
        cost = (
            (queue.pending(now) + others + own) * queue.slowdown
            + self._config.own_work_weight * own
            + ACTIVE_REQUEST_TOKENS * queue.active
            + self._eviction(rank.shelf, prompt_tokens - cached, now)
        )
        return _Offer(rank, cached, cost * queue.speed.seconds_per_token)

    def _eviction(self, shelf: Shelf, tokens: int, now: float) -> float:
        """Effective tokens that somebody will have to compute again if the prompt goes there."""
        oldest = shelf.oldest
        if oldest is None:
            return 0.0
        over = (shelf.held + shelf.pinned - shelf.capacity) * BLOCK_TOKENS + tokens
        wanted_again = exp(-(now - oldest.used_at) / self._config.reuse_horizon_s)
        return self._config.eviction_weight * max(0, min(tokens, over)) * wanted_again

    def _count(self, offer: _Offer, most_cached: int) -> None:
        if not most_cached:
            reason = "cold"
        else:
            reason = "cached" if offer.cached_tokens == most_cached else "balanced"
        self._sink.count(metrics.ROUTING_DECISIONS, labels=(reason,))

    def _ticket(
        self, offer: _Offer, token_ids: Int32Array, prefix: QueuedPrefix, now: float
    ) -> _Ticket:
        tokens, cached = len(token_ids), offer.cached_tokens
        prefill = Prefill(tokens, work_of(tokens, cached), sent_at=now)
        offer.rank.queue.sent(prefill)
        return _Ticket(self._clock, self._sink, offer, prefill, prefix)


class _Ticket:
    """Implements router.policy.base.Ticket."""

    def __init__(
        self,
        clock: Clock,
        sink: MetricSink,
        offer: _Offer,
        prefill: Prefill,
        prefix: QueuedPrefix,
    ) -> None:
        self._clock = clock
        self._sink = sink
        self._expected = offer.cached_tokens
        self._queue = offer.rank.queue
        self._prefill = prefill
        self._prefix = prefix

    @property
    def expected_tokens(self) -> int | None:
        return self._expected

    def started(self, cached_tokens: int | None) -> None:
        now = self._clock.now()
        found = self._expected if cached_tokens is None else cached_tokens
        self._queue.first_token(self._prefill, work_of(self._prefill.tokens, found), now)
        self._prefix.computed(now)
        if cached_tokens is not None:
            self._compare(cached_tokens)

    def ended(self, token_ids: Int32Array | None) -> None:
        self._queue.left(self._prefill)
        # the KV of the last token is never computed
        kept = None if token_ids is None else token_ids[:-1]
        self._prefix.ended(kept, self._clock.now())

    def _compare(self, found: int) -> None:
        """The index's accuracy, for operators."""
        self._sink.count(metrics.PREDICTED_CACHED_TOKENS, self._expected)
        direction = "over" if found < self._expected else "under"
        error = abs(found - self._expected)
        self._sink.count(metrics.CACHE_PREDICTION_ERROR_TOKENS, error, (direction,))
