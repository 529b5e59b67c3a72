"""Events in, reports out: what an engine answers to each kind of event."""

from __future__ import annotations

import pytest

from core.rpc.events import Aborted, PeerLost, PeerMessage, Pinged, RouterLost, StatusAsked
from core.wire import ErrorKind, FinishReason, PageAccount, Usage
from tests.support.engines import CONTEXT, Listener, make_unified
from tests.support.fake_runner import generate
from tests.support.requests import request


@pytest.fixture
def engine():
    return make_unified()


@pytest.fixture
def listener(engine):
    return Listener(engine)


def test_a_request_gets_its_tokens_one_by_one_and_one_finish(listener):
    listener.submit(request("r", [1, 2, 3], 3))
    listener.step(3)
    chunks = listener.chunks("r")
    assert [chunk.offset for chunk in chunks] == [0, 1, 2]
    assert listener.tokens("r") == generate([1, 2, 3], 3)
    assert [chunk.finish for chunk in chunks] == [None, None, FinishReason.LENGTH]
    assert [chunk.last for chunk in chunks] == [False, False, True]
    assert listener.engine.idle


def test_usage_is_said_once_with_the_first_chunk(listener):
    for rid in ("cold", "warm"):
        listener.submit(request(rid, [1, 2, 3, 4], 3))
        listener.step(3)
    cold, warm = ([c.usage for c in listener.chunks(rid)] for rid in ("cold", "warm"))
    assert cold == [Usage(prompt_tokens=4, cached_tokens=0), None, None]
    assert warm == [Usage(prompt_tokens=4, cached_tokens=3), None, None]
    load = listener.engine.load()
    assert (load.prompt_tokens, load.cached_tokens, load.output_tokens) == (8, 3, 6)


def test_usage_is_said_with_the_end_when_there_was_no_token(listener):
    listener.submit(request("r", [1, 2, 3], 3))
    listener.engine.handle(Aborted("a", "r"))
    listener.step()
    (chunk,) = listener.chunks("r")
    assert (chunk.finish, chunk.last, chunk.token_ids) == (FinishReason.ABORT, True, ())
    assert chunk.usage == Usage(prompt_tokens=3)


def test_a_continued_request_goes_on_at_its_offset(listener):
    whole = generate([1, 2, 3], 5)
    listener.submit(request("r", [1, 2, 3, *whole[:2]], 5, prompt_len=3))
    listener.step(3)
    assert [chunk.offset for chunk in listener.chunks("r")] == [2, 3, 4]
    assert listener.tokens("r") == whole[2:]
    assert listener.chunks("r")[0].usage == Usage(prompt_tokens=3)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (request("r", [1] * CONTEXT, 1), f"has {CONTEXT} tokens"),
        (request("r", [], 1), "at least one prompt token"),
        (request("r", [1, 2], 1, prompt_len=3), "at least one prompt token"),
        (request("r", [1, 2, 3], 2, prompt_len=1), "max_new_tokens"),
    ],
)
def test_what_can_never_work_is_refused(listener, wanted, words):
    listener.submit(wanted)
    listener.step()
    (chunk,) = listener.chunks("r")
    assert (chunk.finish, chunk.last) == (FinishReason.ERROR, True)
    assert chunk.error.kind is ErrorKind.INVALID
    assert words in chunk.error.message
    assert len(listener.engine.streams) == 0


def test_the_longest_prompt_that_fits_gets_one_token():
    listener = Listener(make_unified(step_tokens=CONTEXT))
    listener.submit(request("r", [1] * (CONTEXT - 1), 50))
    listener.step(2)
    assert listener.finishes("r") == [FinishReason.LENGTH]
    assert len(listener.tokens("r")) == 1


def test_an_id_in_use_is_refused_and_its_owner_goes_on(listener):
    listener.submit(request("r", [1, 2, 3], 3))
    listener.step()
    listener.submit(request("r", [4, 5, 6], 3), router="b")
    listener.step(2)
    heard = {r: [c for router, c in listener.said if router == r] for r in "ab"}
    assert [t for c in heard["a"] for t in c.token_ids] == generate([1, 2, 3], 3)
    (refused,) = heard["b"]
    assert "in use" in refused.error.message
    listener.submit(request("r", [4, 5, 6], 3), router="b")  # free again
    listener.step(3)
    assert listener.finishes("r")[-1] is FinishReason.LENGTH


def test_an_abort_needs_the_exact_id_and_the_right_router(listener):
    for rid in ("r1", "r10"):
        listener.submit(request(rid, [1, 2, len(rid)], 9))
    listener.step()
    for event in (Aborted("a", "r"), Aborted("b", "r1"), Aborted("a", "r100")):
        listener.engine.handle(event)
    listener.step()
    assert listener.finishes("r1") == []
    listener.engine.handle(Aborted("a", "r1"))
    listener.step(9)
    assert listener.finishes("r1") == [FinishReason.ABORT]
    assert listener.tokens("r1") == generate([1, 2, 2], 2)
    assert listener.finishes("r10") == [FinishReason.LENGTH]


def test_a_lost_router_takes_its_requests_along_and_no_others():
    listener = Listener(make_unified(max_running=2))
    for rid, router in (("a1", "a"), ("b1", "b"), ("a2", "a")):  # a2 still waits
        listener.submit(request(rid, [1, 2, ord(rid[0]), ord(rid[1])], 4), router)
    listener.step()
    listener.engine.handle(RouterLost("a"))
    listener.step(6)
    assert listener.finishes("a1") == listener.finishes("a2") == [FinishReason.ABORT]
    assert listener.finishes("b1") == [FinishReason.LENGTH]
    account = listener.engine.scheduler.cache.account()
    assert account.owned == 0
    assert listener.engine.idle


def test_a_report_goes_to_the_router_it_concerns(engine):
    listener = Listener(engine)
    listener.submit(request("ra", [1, 2], 1), "a")
    listener.submit(request("rb", [3, 4], 1), "b")
    reports = engine.step(0.0)
    assert {router: [c.rid for c in r.chunks] for router, r in reports.items()} == {
        "a": ["ra"],
        "b": ["rb"],
    }
    assert engine.step(0.0) == {}


def test_a_ping_is_answered_once_with_the_load(engine):
    engine.handle(Pinged("a"))
    reports = engine.step(0.0)
    assert set(reports) == {"a"}
    assert reports["a"].chunks == ()
    assert reports["a"].load == engine.load()
    assert engine.step(0.0) == {}


def test_the_load_counts_requests_tokens_and_pages():
    engine = make_unified(pages=200, step_tokens=16, max_running=1)
    listener = Listener(engine)
    listener.submit(request("r", list(range(20)), 5))
    listener.submit(request("s", list(range(30, 40)), 5))
    listener.step()
    load = engine.load()
    assert (load.running_requests, load.waiting_requests, load.handoff_requests) == (1, 1, 0)
    assert load.waiting_tokens == 10 + 4
    assert (load.total_pages, load.free_pages, load.cached_pages) == (200, 180, 0)
    assert load.steps == 1
    assert engine.scheduler.cache.account() == PageAccount(total=200, free=180, cached=16, owned=4)


def test_tokens_and_stop_tokens_end_a_stream():
    first, second = generate([1, 2, 3], 2)
    assert first != second
    listener = Listener(make_unified(eos=frozenset({second})))
    listener.submit(request("eos", [1, 2, 3], 9))
    listener.submit(request("ignored", [1, 2, 3], 3, ignore_eos=True))
    listener.submit(request("stop", [1, 2, 3], 9, stop_token_ids=(first,)))
    listener.step(4)
    assert listener.finishes("eos") == [FinishReason.STOP]
    assert listener.tokens("eos") == [first, second]  # the stop token itself is said
    assert listener.finishes("ignored") == [FinishReason.LENGTH]
    assert listener.tokens("stop") == [first]


def test_a_unified_rank_has_no_peers(engine):
    engine.handle(PeerMessage("p", b"?"))
    engine.handle(PeerLost("p"))
    assert engine.step(0.0) == {}
    assert engine.role.counts() == {}
    assert engine.role.kv_bytes == (0, 0)


def test_the_step_loop_answers_for_the_status(engine):
    with pytest.raises(AssertionError):
        engine.handle(StatusAsked(lambda _: None))
