"""The rules of the policy cache_aware, one small case each."""

from __future__ import annotations

import numpy as np
import pytest

from core import metrics
from core.block_hash import BLOCK_TOKENS, block_hashes
from core.clock import VirtualClock
from core.config import CacheAwareConfig
from core.metrics import PrometheusSink
from core.wire import LoadReport
from router.policy.base import PolicyContext
from router.policy.cache_aware import make
from tests.support.candidates import Rank

A, B, C = range(3)


class Room:
    """The policy, its ranks, and requests that run on them."""

    def __init__(self, ranks: int = 2, capacity: int = 1 << 20, **config: float) -> None:
        self.clock = VirtualClock()
        self.sink = PrometheusSink()
        context = PolicyContext(CacheAwareConfig(**config), self.clock, self.sink)
        self.policies = make(context)
        self.policy = self.policies.prefill
        self.ranks = [Rank(number, capacity_tokens=capacity) for number in range(ranks)]

    def send(self, ids, only=None, salt=""):
        """The number of the chosen rank, and the ticket."""
        ranks = self.ranks if only is None else [self.ranks[only]]
        chosen, ticket = self.policy.assign(ranks, ids, salt)
        return chosen.number, ticket

    def serve(self, ids, only, seconds=None, cached=None, salt=""):
        """Run a request to its end: 0.1 ms a token unless ``seconds`` are given."""
        _, ticket = self.send(ids, only, salt)
        self.clock.advance(1e-4 * len(ids) if seconds is None else seconds)
        ticket.started(cached)
        ticket.ended(ids)

    def count(self, metric, *labels) -> float:
        pairs = zip(metric.labels, labels, strict=True)
        shown = ",".join(f'{name}="{value}"' for name, value in pairs)
        name = f"antiphon_{metric.name}_total{f'{{{shown}}}' if shown else ''}"
        lines = self.sink.render().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def prompt(seed: int, tokens: int = 1024) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, tokens).astype(np.int32)


def join(*parts) -> np.ndarray:
    return np.concatenate(parts)


def test_the_holder_of_the_prefix_wins():
    room = Room()
    for holder in (A, B):
        room.serve(prompt(holder), holder)
    for holder in (A, B, B, A):
        assert room.send(join(prompt(holder), prompt(9, 50)))[0] == holder


def test_only_the_holder_of_the_prefix_with_the_same_salt_wins():
    room = Room()
    for holder, salt in ((A, "mine"), (B, "")):
        room.serve(prompt(1), holder, salt=salt)
    assert [room.send(prompt(1), salt=salt)[0] for salt in ("", "mine", "mine")] == [B, A, A]


def test_a_busy_holder_loses_once_waiting_costs_more_than_computing():
    room = Room()
    room.serve(prompt(1, 2048), A)
    asked = join(prompt(1, 2048), prompt(2, 64))
    for seed in range(10, 13):
        room.send(prompt(seed, 1000), only=A)
    assert room.send(asked)[0] == A  # 3000 tokens to wait for, about 2 x 2048 to save
    for seed in range(20, 23):
        room.send(prompt(seed, 1000), only=A)
    assert room.send(asked)[0] == B


def test_all_holders_are_considered_and_the_less_loaded_one_wins():
    room = Room(3)
    shared = prompt(1)
    room.serve(join(shared, prompt(2, 512)), A)
    room.serve(shared, B)
    room.send(prompt(3, 4000), only=A)
    assert room.send(join(shared, prompt(2, 512)))[0] == B


def test_without_any_holder_the_cheapest_rank_is_the_one_with_the_least_work():
    room = Room(3)
    room.send(prompt(1, 1000), only=A)
    for seed in (2, 3, 4):
        room.send(prompt(seed, 100), only=B)
    assert room.send(prompt(5))[0] == C
    assert room.send(prompt(6))[0] == B  # three short prompts are less work than a long one


def test_what_is_queued_counts_as_held():
    room = Room()
    first, _ = room.send(join(prompt(1), prompt(2, 16)))
    assert room.send(join(prompt(1), prompt(3, 16)))[0] == first


def test_prefill_work_is_gone_with_the_first_token_and_before_that_shrinks_with_time():
    room = Room(capacity=1 << 24)
    for _ in range(5):  # learn the speed
        room.serve(prompt(0, 4096), A, cached=0)
    queue = room.policy._ranks[room.ranks[A].incarnation].queue
    _, ticket = room.send(prompt(1, 1000), only=A)
    whole = queue.pending(room.clock.now())
    assert whole == pytest.approx(1072, rel=0.02)
    room.clock.advance(0.05)
    assert queue.pending(room.clock.now()) == pytest.approx(whole / 2, rel=0.1)
    room.clock.advance(100)
    assert queue.pending(room.clock.now()) == 0
    ticket.started(0)
    assert queue.pending(room.clock.now()) == queue.tokens == 0
    assert queue.active == 1
    ticket.ended(None)
    assert queue.active == 0


def test_generating_requests_make_a_rank_a_little_dearer():
    room = Room()
    room.serve(prompt(8), B)  # on a tie the emptier rank, A, would win
    for seed in range(3):
        room.send(prompt(seed, 20), only=A)[1].started(0)
    assert room.send(prompt(9, 20))[0] == B


def test_a_cold_prompt_goes_where_it_evicts_least():
    room = Room(capacity=2048)
    room.serve(prompt(1, 1536), A)
    room.serve(prompt(2, 1024), B)
    room.send(prompt(3, 16), only=B)  # a little work, but all of a new prompt fits
    assert room.send(prompt(4, 1024))[0] == B


def test_what_has_not_been_used_for_long_is_evicted_first():
    room = Room(capacity=2048)
    room.serve(prompt(1, 2048), B)
    room.clock.advance(600.0)
    room.serve(prompt(2, 2048), A)
    room.send(prompt(3, 16), only=B)
    assert room.send(prompt(4, 1024))[0] == B


def test_without_a_price_of_eviction_only_work_counts():
    room = Room(capacity=2048, eviction_weight=0.0)
    room.serve(prompt(1, 2048), A)
    room.clock.advance(600.0)
    room.serve(prompt(2, 2048), B)
    room.send(prompt(3, 64), only=A)
    assert room.send(prompt(4, 1024))[0] == B


def test_the_output_is_learned_and_what_was_evicted_is_forgotten():
    room = Room(capacity=2048)
    question, answer = prompt(1, 512), prompt(2, 512)
    _, ticket = room.send(question, only=A)
    ticket.started(0)
    ticket.ended(join(question, answer))
    held = room.policy._index.match
    shelf = room.policy._ranks[room.ranks[A].incarnation].shelf
    hashes = block_hashes(join(question, answer))
    assert held(hashes) == {shelf: 1024 // BLOCK_TOKENS - 1}  # the last token was not computed
    room.serve(prompt(3, 2048), A)
    assert held(hashes) == {}


def test_work_of_other_routers_is_seen_in_the_report():
    room = Room()
    room.ranks[A].load = LoadReport(waiting_tokens=5000)
    assert [room.send(prompt(seed, 100))[0] for seed in range(4)] == [B] * 4


def test_our_own_work_is_not_counted_twice():
    room = Room()
    room.send(prompt(1, 1000), only=A)
    room.send(prompt(2, 1200), only=B)
    room.ranks[A].load = LoadReport(waiting_tokens=1000)
    assert room.send(prompt(3, 100))[0] == A


def test_a_slow_rank_gets_less():
    room = Room(capacity=1 << 24)
    for seed in range(40):
        room.serve(prompt(seed, 4096), A, seconds=4.0, cached=0)
        room.serve(prompt(100 + seed, 4096), B, seconds=1.0, cached=0)
    for seed in range(200, 202):
        room.send(prompt(seed, 1000), only=B)
    assert room.send(prompt(300, 2000))[0] == B


def test_a_restarted_rank_starts_without_a_cache():
    room = Room()
    room.serve(prompt(1), A)
    room.policy.forget(room.ranks[A].incarnation)
    room.ranks[A].nonce = "n1"
    room.send(prompt(5, 32), only=A)
    assert room.send(prompt(1))[0] == B


def test_decisions_and_predictions_are_counted():
    room = Room()
    room.serve(prompt(1), A, cached=0)
    room.serve(prompt(1), A, cached=1000)
    room.serve(join(prompt(1), prompt(2, 10)), A, cached=1030)
    for seed in range(10, 16):
        room.send(prompt(seed, 1000), only=A)
    room.send(prompt(1))
    reasons = ("cold", "cached", "balanced")
    assert [room.count(metrics.ROUTING_DECISIONS, reason) for reason in reasons] == [7, 2, 1]
    assert room.count(metrics.PREDICTED_CACHED_TOKENS) == 1023 + 1024  # never the last token
    assert room.count(metrics.CACHE_PREDICTION_ERROR_TOKENS, "over") == 23
    assert room.count(metrics.CACHE_PREDICTION_ERROR_TOKENS, "under") == 6


# --- decode ------------------------------------------------------------------------------------


def decode(room, ids, salt=""):
    chosen, ticket = room.policies.decode.assign(room.ranks, ids, salt)
    return chosen.number, ticket


def test_outputs_go_to_the_emptiest_pool():
    room = Room(capacity=10_000)
    room.ranks[A].outstanding_tokens, room.ranks[B].outstanding_tokens = 4000, 3000
    assert decode(room, prompt(1))[0] == B
    room.ranks[B].load = LoadReport(total_pages=100, free_pages=20, cached_pages=10)
    assert decode(room, prompt(1))[0] == A  # 70 of 100 pages in use there, by others too


def test_a_known_prefix_breaks_ties_only_for_its_salt():
    room = Room(ranks=3, capacity=10_000)
    first, ticket = decode(room, prompt(1), "mine")
    ticket.started(None)
    ticket.ended(prompt(1))
    assert {decode(room, prompt(1), "mine")[0] for _ in range(3)} == {first}
    assert decode(room, prompt(1))[0] != first


def test_pools_of_different_sizes_are_compared_by_their_share():
    room = Room(capacity=10_000)
    room.ranks[B].capacity_tokens = 100_000
    room.ranks[A].outstanding_tokens, room.ranks[B].outstanding_tokens = 3000, 9000
    assert decode(room, prompt(1))[0] == B


def test_a_known_prefix_decides_between_nearly_equal_pools():
    room = Room(capacity=10_000)
    number, ticket = decode(room, prompt(1))
    ticket.started(None)
    ticket.ended(join(prompt(1), prompt(2, 100)))
    other = 1 - number
    room.ranks[number].outstanding_tokens = 400
    assert decode(room, join(prompt(1), prompt(2, 90)))[0] == number
    room.ranks[number].outstanding_tokens = 600
    assert decode(room, prompt(1))[0] == other
