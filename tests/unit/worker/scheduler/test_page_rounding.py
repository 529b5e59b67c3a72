"""Admission, headroom and kept matches, where pages have several tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.engines import CONTEXT
from tests.support.requests import request
from worker.cache.prefix_cache import PrefixCache
from worker.cache.radix import RadixTree
from worker.scheduler.admission import WORTH_WAITING_FOR, Admission, Limits
from worker.scheduler.headroom import FIRST_RATIO, Headroom
from worker.scheduler.matches import Matches
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.waiting import WaitingQueue
from worker.sequence import Sequence

SIZE = 4
LIMITS = Limits(max_running=8, step_tokens=64, context_len=CONTEXT)


def sequence(ids: list[int], max_new: int = 8) -> Sequence:
    return Sequence.of(request("r", ids, max_new), "router", CONTEXT)


def numbers(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def cached(cache: PrefixCache, ids: list[int]) -> None:
    """Compute and release these."""
    one = sequence(ids)
    cache.begin(one, len(ids))
    assert cache.extend(one, len(ids))
    cache.launched()
    cache.collected()
    one.computed_len = len(ids)
    cache.release(one)


def test_a_prompt_needs_whole_pages():
    admission = Admission(PrefixCache(3 * SIZE, 4, CONTEXT, SIZE), LIMITS)
    nine, five = sequence(numbers(9)), sequence(numbers(5, 50))
    assert admission.reserve(nine, [], 9, 8)
    assert not admission.reserve(five, [nine], 5, 4)


def test_rather_than_wait_for_the_page_it_would_copy_from_a_sequence_computes():
    cache = PrefixCache(3 * SIZE, 4, CONTEXT, SIZE)
    cached(cache, [1, 2, 3])
    one = sequence([1, 2, *numbers(7, 50)])
    assert Admission(cache, LIMITS).reserve(one, [], 9, 8)  # all three pages
    assert (one.computed_len, one.cached_len) == (0, 0)
    assert not cache.copies_due
    other = PrefixCache(4 * SIZE, 4, CONTEXT, SIZE)
    cached(other, [1, 2, 3])
    one = sequence([1, 2, *numbers(7, 50)])
    assert Admission(other, LIMITS).reserve(one, [], 9, 8)
    assert one.computed_len == 2


def test_a_refused_reservation_evicts_and_locks_nothing():
    cache = PrefixCache(4 * SIZE, 4, CONTEXT, SIZE)
    cached(cache, [1, 2, 3])
    runs = sequence(numbers(8, 20))
    admission = Admission(cache, LIMITS)
    assert admission.reserve(runs, [], 8, 7)
    before = cache.account()
    assert not admission.reserve(sequence([1, 2, *numbers(11, 50)]), [runs], 13, 12)
    assert cache.account() == before
    assert cache.available == 2 * SIZE


@pytest.mark.parametrize(
    ("length", "slots"),
    [(5, SIZE), (8, 2 * SIZE), (6, SIZE), (7, 2 * SIZE)],  # for six more tokens
)
def test_headroom_is_the_pages_behind_the_last_one(length, slots):
    one = sequence(numbers(length), max_new=6)
    assert Headroom(1 / FIRST_RATIO, SIZE).pages([one]) == slots
    assert Headroom(1 / FIRST_RATIO).pages([one]) == 6


def test_nobody_waits_for_a_page_that_a_prefill_will_not_fill():
    """The tree gets a last page that is not full only when its sequence ends."""
    for size, started in ((1, 1), (64, 2)):
        cache = PrefixCache(128 * 4, 8, CONTEXT, size)
        admission, waiting = Admission(cache, LIMITS), WaitingQueue()
        for last in (98, 99):
            waiting.push(sequence([*numbers(WORTH_WAITING_FOR + 8), last, 5]))
        assert len(admission.admit(waiting, [], 200)) == started


def test_a_step_may_only_copy():
    cache = PrefixCache(10 * SIZE, 4, CONTEXT, SIZE)
    cached(cache, [1, 2, 3])
    scheduler = Scheduler(cache, LIMITS)
    assert scheduler.next_plan(0.0) is None
    awaits_kv = sequence([1, 2, 7, 7])
    assert scheduler.admission.reserve(awaits_kv, [], 4, 4)
    step = scheduler.next_plan(0.0)
    assert step is not None
    assert (step.batch, step.plan.tokens, step.plan.kv_lens) == ((), 0, ())
    (copy,) = step.plan.copies
    assert copy.target.tolist() == cache.table.read(awaits_kv.row, 0, 2).tolist()
    assert scheduler.next_plan(0.0) is None
    assert cache.in_flight == 1


STEM = [i * i % 5 % 2 for i in range(16)]
ids = st.builds(
    lambda stem, own: [*STEM[:stem], *own],
    st.integers(0, 16),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
change = st.one_of(
    st.tuples(st.sampled_from(["wait", "insert", "keep", "match"]), ids),
    st.tuples(st.just("evict"), st.integers(1, 12)),
    st.tuples(st.just("leave"), st.integers(0, 100)),
)


@settings(max_examples=150, deadline=None)
@given(size=st.sampled_from([1, 4]), changes=st.lists(change, min_size=5, max_size=40))
def test_kept_matches_are_in_whole_pages(size, changes):
    tree, page, waiting = RadixTree(size), 0, []
    matches = Matches(tree)
    for kind, what in changes:
        if kind == "wait":
            waiting.append(sequence(what, 1))
            matches.add(waiting[-1])
        elif kind == "leave" and waiting:
            matches.remove(waiting.pop(what % len(waiting)))
        elif kind == "evict":
            tree.evict(what)
        elif kind == "match":
            tree.match(np.array(what, np.int32))
        elif kind in ("insert", "keep"):
            whole = len(what) // size * size
            slots = np.arange(page * size, page * size + whole + size, dtype=np.int32)
            page += whole // size + 1
            node, _ = tree.insert(np.array(what[:whole], np.int32), slots[:whole])
            if kind == "keep" and what[whole:]:
                tree.keep(node, np.array(what[whole:], np.int32), slots[whole:])
        for one in waiting:
            fresh = tree.locate(one.ids[: one.reusable_len])[2]
            assert matches.length(one) == fresh
            assert fresh % size == 0
            assert 0 <= tree.peek(one.ids[: one.reusable_len]) - fresh < size
        tree.check()


def test_a_copy_does_not_wait_for_a_retraction():
    """Which would have to wait itself, for the step in flight."""
    cache = PrefixCache(4 * SIZE, 4, CONTEXT, SIZE)
    cached(cache, [1, 2, 3])
    scheduler = Scheduler(cache, LIMITS)
    scheduler.add(sequence(numbers(8, 50)))
    first = scheduler.next_plan(0.0)
    assert first is not None
    assert first.plan.tokens == 8
    awaits_kv = sequence([1, 2, 7])
    assert scheduler.admission.reserve(awaits_kv, [], 3, 3)
    second = scheduler.next_plan(0.0)  # no page is left for the next token
    assert second is not None
    assert (second.batch, len(second.plan.copies)) == ((), 1)
    assert scheduler.next_plan(0.0) is None
