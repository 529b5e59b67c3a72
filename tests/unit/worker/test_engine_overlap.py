"""An engine whose next step is planned while one runs, and one whose pages do not add up."""

from __future__ import annotations

import pytest

from core.rpc.events import Aborted
from core.wire import FinishReason
from tests.support.engines import Listener, make_unified
from tests.support.fake_runner import generate
from tests.support.requests import request


@pytest.fixture
def listener():
    return Listener(make_unified(overlap=True))


def test_tokens_come_one_step_late_and_are_the_same(listener):
    listener.submit(request("r", [1, 2, 3], 3))
    listener.step()
    assert listener.said == []
    assert not listener.engine.idle
    listener.step()
    assert listener.tokens("r") == generate([1, 2, 3], 1)
    listener.step(2)
    assert listener.tokens("r") == generate([1, 2, 3], 3)
    assert listener.finishes("r") == [FinishReason.LENGTH]
    assert listener.engine.idle
    assert listener.engine.steps == 3, "the last token is known to be it"


def test_a_stop_token_is_noticed_one_step_late_and_what_follows_is_dropped(listener):
    expected = generate([1, 2, 3], 9)
    at = next(i for i, token in enumerate(expected) if token not in expected[:i] and i)
    listener.submit(request("r", [1, 2, 3], 9, stop_token_ids=(expected[at],)))
    listener.step(at + 2)
    assert listener.finishes("r") == [FinishReason.STOP]
    assert not listener.engine.idle, "the redundant step is in flight"
    cache = listener.engine.scheduler.cache
    assert cache.account().owned
    listener.step()
    assert listener.engine.idle
    assert listener.tokens("r") == expected[: at + 1]
    assert cache.account().owned == 0
    assert cache.tree.tokens == 3 + at


def test_an_abort_in_flight_ends_the_stream_at_once(listener):
    listener.submit(request("r", [1, 2, 3], 9))
    listener.step(2)
    listener.engine.handle(Aborted("a", "r"))
    listener.step()
    assert listener.finishes("r") == [FinishReason.ABORT]
    assert listener.tokens("r") == generate([1, 2, 3], 1)
    assert listener.engine.idle
    assert listener.engine.scheduler.cache.account().owned == 0


def test_requests_that_share_a_prompt_get_the_same_tokens(listener):
    for n in range(4):
        listener.submit(request(f"r{n}", [1, 2, 3, 4], 6))
    listener.step(20)
    assert [listener.tokens(f"r{n}") for n in range(4)] == [generate([1, 2, 3, 4], 6)] * 4
    assert listener.engine.idle


# --- pages that do not add up -----------------------------------------------------------------


def lose_a_page(engine) -> None:
    engine.scheduler.cache.slots.allocate(1)


def lock_forever(engine) -> None:
    tree = engine.scheduler.cache.tree
    tree.lock(next(iter(tree.root.children.values())))


def keep_a_row(engine) -> None:
    engine.scheduler.cache.table.take()


def own_too_many(engine) -> None:
    engine.scheduler.cache._owned += 2


BREAK = [lose_a_page, lock_forever, keep_a_row, own_too_many]


@pytest.mark.parametrize("damage", BREAK)
def test_in_tests_it_raises(damage):
    listener = Listener(make_unified())
    listener.submit(request("r", [1, 2, 3], 2))
    listener.step(3)
    damage(listener.engine)
    with pytest.raises(AssertionError, match="do not add up"):
        listener.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("damage", BREAK)
def test_in_service_it_is_logged_once_counted_and_repaired(damage, overlap, caplog):
    listener = Listener(make_unified(overlap=overlap))
    engine = listener.engine
    engine.strict = False
    listener.submit(request("early", [1, 2, 3], 2))
    listener.step(4)
    for rid in ("r", "s"):
        listener.submit(request(rid, [1, 2, 3, ord(rid)], 8))
    listener.step(3)
    for _ in range(2):
        damage(engine)
        listener.step(2)
    listener.step(12)
    for rid in ("r", "s"):
        assert listener.tokens(rid) == generate([1, 2, 3, ord(rid)], 8)
    assert engine.load().page_repairs >= 1
    assert caplog.text.count("do not add up") == 1
    cache = engine.scheduler.cache
    cache.check()
    assert cache.account().owned == 0
    assert cache.table.free == cache.table.rows
    cache.flush()
    assert cache.slots.free == cache.slots.total
    listener.submit(request("late", [1, 2, 3], 3))
    listener.step(5)
    assert listener.tokens("late") == generate([1, 2, 3], 3)
