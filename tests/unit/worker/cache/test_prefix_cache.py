"""Who owns which page, from begin to release."""

from __future__ import annotations

import numpy as np
import pytest

from core.wire import PageAccount
from tests.support.requests import request
from worker.cache.prefix_cache import GROWTH, SLACK, PrefixCache
from worker.cache.request_table import RequestTable
from worker.sequence import NO_ROW, Sequence


def sequence(ids: list[int], max_new: int = 50, salt: str = "") -> Sequence:
    return Sequence.of(request("r", ids, max_new, salt=salt), "router", 100)


def compute(cache: PrefixCache, ids: list[int], salt: str = "") -> Sequence:
    """A sequence whose whole prompt is computed and committed."""
    one = sequence(ids, salt=salt)
    cache.begin(one, one.length - 1)
    assert cache.extend(one, one.length)
    one.computed_len = one.length
    cache.commit(one)
    cache.check()
    return one


def slots(cache: PrefixCache, one: Sequence) -> list[int]:
    return cache.table.read(one.row, 0, one.allocated_len).tolist()


def account(total: int, *, free: int, cached: int, owned: int) -> PageAccount:
    return PageAccount(total=total, free=free, cached=cached, owned=owned)


def test_pages_go_from_free_to_owned_to_cached():
    cache = PrefixCache(10, 2, 100)
    one = sequence([1, 2, 3, 4])
    cache.begin(one, 3)
    assert cache.extend(one, 4)
    assert cache.account() == account(10, free=6, cached=0, owned=4)
    one.computed_len = 3
    cache.commit(one)
    assert cache.account() == account(10, free=6, cached=3, owned=1)
    assert cache.available == 6  # the cached pages are locked
    cache.release(one)
    assert cache.account() == account(10, free=7, cached=3, owned=0)
    assert cache.available == 10
    assert (one.row, one.node, one.allocated_len) == (NO_ROW, None, 0)
    assert cache.flush() == 3
    assert cache.account() == account(10, free=10, cached=0, owned=0)


def test_a_prefix_computed_by_another_is_shared_while_it_still_runs():
    cache = PrefixCache(20, 2, 100)
    first = compute(cache, [1, 2, 3, 4])
    second = sequence([1, 2, 3, 9])
    cache.begin(second, 3)
    assert (second.computed_len, second.cached_len) == (3, 3)
    assert cache.extend(second, 4)
    assert slots(cache, second)[:3] == slots(cache, first)[:3]
    assert cache.account().owned == 1


def test_another_salt_computes_the_same_prompt_into_pages_of_its_own():
    cache = PrefixCache(20, 3, 100)
    first = compute(cache, [1, 2, 3, 4])
    mine = sequence([1, 2, 3, 4], salt="mine")
    cache.begin(mine, 3)
    assert (mine.computed_len, mine.cached_len) == (0, 0)
    cache.release(mine)
    mine = compute(cache, [1, 2, 3, 4], "mine")
    assert not set(slots(cache, mine)) & set(slots(cache, first))
    again = sequence([1, 2, 3, 9], salt="mine")
    cache.begin(again, 3)
    assert slots(cache, again) == slots(cache, mine)[:3]
    for each in (first, mine, again):
        cache.release(each)
        cache.check()


def test_a_whole_cached_prompt_still_computes_its_last_token():
    cache = PrefixCache(20, 2, 100)
    cache.release(compute(cache, [1, 2, 3, 4]))
    again = sequence([1, 2, 3, 4])
    cache.begin(again, again.length - 1)
    assert again.remaining == 1


def test_of_two_that_computed_the_same_the_second_takes_over_the_pages_of_the_first():
    cache = PrefixCache(20, 2, 100)
    one, two = sequence([1, 2, 3, 4]), sequence([1, 2, 3, 7])
    for each in (one, two):
        cache.begin(each, 3)
        assert cache.extend(each, 4)
    assert not set(slots(cache, one)) & set(slots(cache, two))
    for each in (one, two):
        each.computed_len = 4
        cache.commit(each)
    assert slots(cache, one)[:3] == slots(cache, two)[:3]
    assert cache.account() == account(20, free=15, cached=5, owned=0)
    for each in (one, two):
        cache.release(each)
        cache.check()


def test_extend_evicts_what_nobody_reads_and_refuses_without_a_change():
    cache = PrefixCache(10, 3, 100)
    cache.release(compute(cache, [1, 2, 3, 4, 5, 6]))
    one = sequence([9] * 8)
    cache.begin(one, 7)
    assert cache.extend(one, 8)
    assert cache.account() == account(10, free=0, cached=2, owned=8)
    before = cache.account(), slots(cache, one), cache.tree.version
    assert not cache.extend(one, 11)
    assert (cache.account(), slots(cache, one), cache.tree.version) == before
    cache.check()


def test_a_decoding_sequence_grows_by_a_stretch_where_pages_are_plenty():
    cache = PrefixCache(1000, 2, 100)
    one = compute(cache, [1, 2, 3])
    one.append(4)
    assert cache.grow(one, 60)
    assert one.allocated_len == 3 + GROWTH
    pages = slots(cache, one)
    assert pages == list(range(pages[0], pages[0] + len(pages)))
    assert cache.grow(one, 60)
    assert one.allocated_len == 3 + GROWTH  # enough for now


def test_growth_ends_where_the_sequence_will():
    cache = PrefixCache(1000, 2, 100)
    one = compute(cache, [1, 2, 3])
    one.append(4)
    assert cache.grow(one, 6)
    assert one.allocated_len == 6


def test_a_decoding_sequence_grows_by_one_where_pages_are_few():
    cache = PrefixCache(5, 2, 100)
    one = compute(cache, [1, 2, 3])
    for wanted in (True, True, False):
        one.append(4)
        assert cache.grow(one, 60) is wanted
    assert one.allocated_len == 5


def test_release_of_what_owns_nothing_does_nothing():
    cache = PrefixCache(5, 2, 100)
    cache.release(sequence([1]))
    assert cache.account() == account(5, free=5, cached=0, owned=0)


def test_check_finds_a_lost_page():
    cache = PrefixCache(5, 2, 100)
    cache.slots.allocate(1)
    with pytest.raises(AssertionError, match="leaked"):
        cache.check()


def test_rows_of_the_request_table_are_taken_and_given_back():
    table = RequestTable(2, 8)
    rows = {table.take(), table.take()}
    assert rows == {0, 1}
    assert table.free == 0
    table.write(1, 2, np.array([7, 8], np.int32))
    assert table.read(1, 1, 4).tolist() == [0, 7, 8]
    assert table.read(1, 1, 4).dtype == np.int32
    table.give_back(1)
    with pytest.raises(AssertionError, match="twice"):
        table.give_back(1)
    assert table.take() == 1


def test_a_full_pool_evicts_beyond_need_and_leaves_scraps_alone():
    cache = PrefixCache(1280, 4, 100)
    for row in range(15):  # each leaves one free page behind: the last token is never computed
        one = sequence([1000 * row + i for i in range(21)])
        cache.begin(one, 20)
        assert cache.extend(one, 21)
        one.computed_len = 20
        cache.release(one)
    for row in range(15, 63):
        cache.release(compute(cache, [1000 * row + i for i in range(20)]))
    assert cache.slots.free == 20
    prompt = compute(cache, [90_000 + i for i in range(60)])
    assert slots(cache, prompt) == list(range(60))
    assert cache.slots.free == 1280 // SLACK


def test_a_full_pool_still_grows_by_a_stretch():
    cache = PrefixCache(200, 4, 100)
    one, other = (compute(cache, [100 * row + i for i in range(20)]) for row in range(2))
    for row in range(2, 10):
        cache.release(compute(cache, [100 * row + i for i in range(20)]))
    assert cache.slots.free == 0
    for each in (one, other):
        each.append(7)
        assert cache.grow(each, 60)
        assert each.allocated_len == 20 + GROWTH


def test_what_grows_goes_on_behind_its_last_page():
    cache = PrefixCache(100, 5, 100)
    rows = [
        compute(cache, [100 * row + i for i in range(n)]) for row, n in enumerate((5, 5, 5, 3, 5))
    ]
    first, second, _, fourth, last = rows
    cache.release(second)
    cache.release(fourth)
    cache.flush()  # holes at 5 and 15, and the rest of the pool behind the last
    last.append(7)
    assert cache.grow(last, 40)
    assert slots(cache, last) == list(range(18, 23 + GROWTH))
    first.append(7)
    assert cache.extend(first, 8)
    assert slots(cache, first) == list(range(8))  # three would fit better at 15
