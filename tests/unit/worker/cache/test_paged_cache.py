"""PrefixCache with pages of several tokens: who owns which page, and what is copied."""

from __future__ import annotations

import numpy as np
import pytest

from core.wire import PageAccount
from tests.support.requests import request
from worker.cache.copies import SlotCopy
from worker.cache.prefix_cache import PrefixCache
from worker.sequence import Sequence

SIZE = 4


def make(pages: int = 20, rows: int = 6) -> PrefixCache:
    return PrefixCache(pages * SIZE, rows, 50, SIZE)


def sequence(ids: list[int]) -> Sequence:
    return Sequence.of(request("r", ids, 50), "router", 50)


def begin(cache: PrefixCache, ids: list[int]) -> Sequence:
    one = sequence(ids)
    cache.begin(one, one.length - 1)
    assert cache.extend(one, one.length)
    cache.check()
    return one


def step(cache: PrefixCache, *sequences: Sequence) -> list[tuple[list[int], list[int]]]:
    """A step that computes all of these; what it copied."""
    copies = cache.launched()
    cache.collected()
    for one in sequences:
        one.computed_len = one.length
        cache.commit(one)
    cache.check()
    return plain(copies)


def plain(copies: tuple[SlotCopy, ...]) -> list[tuple[list[int], list[int]]]:
    return [(copy.source.tolist(), copy.target.tolist()) for copy in copies]


def cached(cache: PrefixCache, ids: list[int]) -> list[int]:
    """Compute and release these tokens; the slots they had."""
    one = begin(cache, ids)
    step(cache, one)
    slots = cache.table.read(one.row, 0, one.length).tolist()
    cache.release(one)
    cache.check()
    return slots


def row(cache: PrefixCache, one: Sequence) -> list[int]:
    return cache.table.read(one.row, 0, one.allocated_len).tolist()


def account(*, free: int, cached: int, owned: int) -> PageAccount:
    return PageAccount(total=20, free=free, cached=cached, owned=owned)


def test_a_released_sequence_leaves_every_token_behind_the_last_page_in_part():
    cache = make()
    cached(cache, [1, 2, 3, 4, 5, 6])
    assert cache.account() == account(free=18, cached=2, owned=0)
    assert cache.tree.peek(sequence([1, 2, 3, 4, 5, 6, 7]).ids) == 6
    assert cache.sound(quiet=True)
    assert cache.flush() == 2
    assert cache.account() == account(free=20, cached=0, owned=0)


def test_whole_pages_are_shared_and_of_the_boundary_page_what_is_shared_is_copied():
    cache = make()
    first = cached(cache, [1, 2, 3, 4, 5, 6, 7])
    one = begin(cache, [1, 2, 3, 4, 5, 6, 9, 9, 9])
    assert (one.shared_len, one.computed_len, one.cached_len, one.allocated_len) == (4, 6, 6, 12)
    assert row(cache, one)[:4] == first[:4]
    own = row(cache, one)[4:]
    assert not set(own) & set(first)
    assert cache.copies_due
    assert step(cache, one) == [(first[4:6], own[:2])]
    assert not cache.copies_due
    assert step(cache, one) == []


def test_a_prompt_shorter_than_a_page_is_copied_too():
    cache = make()
    first = cached(cache, [1, 2, 3])
    one = begin(cache, [1, 2, 9])
    assert (one.shared_len, one.computed_len) == (0, 2)
    assert step(cache, one) == [(first[:2], row(cache, one)[:2])]


def test_the_source_cannot_be_evicted_until_the_step_that_copies_is_collected():
    cache = make(pages=4)
    cached(cache, [1, 2, 3])
    one = begin(cache, [1, 2, 9])
    assert cache.flush() == 0
    cache.launched()
    assert cache.flush() == 0
    cache.collected()
    assert cache.flush() == 1
    cache.release(one)
    cache.check()


def test_nothing_is_copied_for_what_is_released_before():
    cache = make()
    first = cached(cache, [1, 2, 3])
    one = begin(cache, [1, 2, 9])
    cache.release(one)
    assert cache.sound(quiet=True)
    assert cache.launched() == ()
    cache.collected()
    assert cache.account() == account(free=19, cached=1, owned=0)
    assert cache.tree.match(sequence([1, 2, 3]).ids).boundary.slots.tolist() == first


def test_what_a_step_in_flight_copies_into_is_not_given_away():
    """A decode rank's room may close while nothing else of the sequence is in flight."""
    cache = make()
    cached(cache, [1, 2, 3])
    one = begin(cache, [1, 2, 9])
    cache.launched()
    cache.release(one)
    assert cache.account() == account(free=18, cached=1, owned=1)
    assert cache.flush() == 0
    cache.collected()
    assert cache.account() == account(free=19, cached=1, owned=0)
    cache.check()


def test_kv_that_came_while_the_copy_is_in_flight_is_cached_and_kept():
    """All of a prompt but the copied tokens was written by a peer; the sequence ends at once."""
    cache = make()
    cached(cache, [1, 2, 3])
    one = begin(cache, [1, 2, 9, 9, 9])
    cache.launched()
    one.computed_len = one.length
    cache.commit(one)
    cache.release(one)
    assert cache.flush() == 0  # the copy would land in somebody else's page
    cache.collected()
    assert cache.tree.peek(sequence([1, 2, 9, 9, 9]).ids) == 5
    assert cache.flush() == 3


def test_nothing_that_is_still_to_be_copied_is_cached():
    cache = make()
    cached(cache, [1, 2, 3])
    one = begin(cache, [1, 2, 9, 9, 9])
    one.computed_len = one.length
    cache.commit(one)
    assert cache.account().cached == 1
    cache.release(one)
    assert cache.tree.peek(sequence([1, 2, 9, 9, 9]).ids) == 2


def test_forgoing_the_copy_leaves_the_tokens_to_be_computed():
    cache = make()
    cached(cache, [1, 2, 3, 4, 5, 6])
    one = begin(cache, [1, 2, 3, 4, 5, 9, 9])
    assert cache.forgo(one)
    assert not cache.forgo(one)
    assert (one.computed_len, one.cached_len, one.remaining) == (4, 4, 3)
    assert step(cache, one) == []


def test_a_page_is_replaced_by_the_trees_when_all_of_it_is_computed_and_not_before():
    cache = make()
    one, two = begin(cache, [1, 2, 3, 4, 5, 6]), begin(cache, [1, 2, 3, 4, 5, 6])
    for each in (one, two):
        each.computed_len = 3
        cache.commit(each)
    assert not set(row(cache, one)) & set(row(cache, two))
    step(cache, one, two)
    assert row(cache, one)[:4] == row(cache, two)[:4]
    assert not set(row(cache, one)[4:]) & set(row(cache, two)[4:])
    assert cache.account() == account(free=17, cached=1, owned=2)
    cache.release(one)
    cache.release(two)  # whose last page the tree has by now
    assert cache.account() == account(free=18, cached=2, owned=0)


def test_the_last_page_of_a_longer_sequence_makes_the_shorter_one_the_next_to_go():
    cache = make(pages=4)
    first = cached(cache, [1, 2, 3])
    cached(cache, [7])
    cached(cache, [1, 2, 3, 4])
    one = begin(cache, [8, 8, 8, 8, 8])
    assert set(row(cache, one)) > set(first)
    assert cache.tree.peek(sequence([1, 2, 3, 4]).ids) == 4
    assert cache.tree.peek(sequence([7]).ids) == 1


def test_an_own_last_page_that_is_in_flight_is_cached_as_far_as_it_is_computed():
    cache = make()
    one = begin(cache, [1, 2, 3, 4, 5, 6, 7])
    one.computed_len = 5
    one.flying = 2
    cache.launched()
    cache.release(one)
    assert cache.tree.peek(sequence([1, 2, 3, 4, 5, 6, 7]).ids) == 5
    assert cache.flush() == 0
    cache.collected()
    assert cache.flush() == 2
    cache.check()


def test_pages_are_taken_whole_and_lie_together():
    cache = make()
    one = begin(cache, [1, 2, 3, 4, 5])
    assert one.allocated_len == 8
    assert cache.extend(one, 8)
    assert one.allocated_len == 8
    one.computed_len = 5
    one.append(6)
    assert cache.grow(one, 30)
    assert one.allocated_len == 8  # there is room in the last page
    for token in (7, 8, 9):
        one.append(token)
    assert cache.grow(one, 30)
    assert one.allocated_len == 24
    assert row(cache, one) == list(range(24))


def test_the_last_page_may_reach_beyond_the_context():
    cache = make()
    one = begin(cache, list(range(47)))
    one.append(1)
    assert cache.grow(one, 50)
    assert one.allocated_len == 48
    for token in (2, 3):
        one.append(token)
    assert cache.grow(one, 50)
    assert one.allocated_len == 52


def test_repair_counts_pages_tails_and_sources():
    cache = make()
    cached(cache, [1, 2, 3, 4, 5, 6])
    one = begin(cache, [1, 2, 3, 4, 5, 9, 9, 9, 9])
    before = cache.account()
    cache.slots.allocate(2 * SIZE)
    cache.tree.lock(cache.tree.match(one.ids).node)
    assert not cache.sound(quiet=False)
    cache.repair([one])
    assert cache.account() == before
    cache.check()
    assert cache.flush() == 0  # the source is still locked
    step(cache, one)
    cache.release(one)
    assert cache.sound(quiet=True)
    assert cache.flush() == 4


def test_a_pool_has_whole_pages():
    with pytest.raises(AssertionError):
        PrefixCache(10, 2, 50, SIZE)


def test_an_account_in_pages_of_one_counts_tokens():
    cache = PrefixCache(80, 2, 50)
    one = sequence([1, 2, 3])
    cache.begin(one, 2)
    assert cache.extend(one, 3)
    assert cache.account() == PageAccount(total=80, free=77, cached=0, owned=3)
    assert np.array_equal(row(cache, one), [0, 1, 2])
