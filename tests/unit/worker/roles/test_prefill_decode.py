"""What the two legs of a request say and hold, one small story each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.rpc.events import Aborted, PeerMessage
from core.wire import ErrorKind, FinishReason, Usage
from tests.support.calm_pair import CalmPair
from tests.support.fake_runner import generate
from tests.support.pd_world import CONTEXT
from worker.sequence import NO_ROW, SequenceState

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def pair():
    return CalmPair()


def everything_is_back(pair: CalmPair) -> None:
    for engine in (pair.prefill, pair.decode):
        assert len(engine.streams) == 0
        assert engine.role.counts() in ({}, {"pending": 0})
        assert engine.scheduler.cache.account().owned == 0
        assert engine.scheduler.cache.available == engine.scheduler.cache.slots.total
        assert engine.idle


def test_the_prefill_leg_says_the_first_token_and_the_decode_leg_the_rest(pair):
    pair.send(pair.ask("r", PROMPT, 4, room=1))
    pair.settle()
    (first,) = pair.of("prefill", "r")
    rest = pair.of("decode", "r")
    tokens = generate(PROMPT, 4)
    assert (first.offset, first.token_ids) == (0, (tokens[0],))
    assert (first.finish, first.last) == (None, True)
    assert [(c.offset, *c.token_ids) for c in rest] == list(enumerate(tokens))[1:]
    assert [c.finish for c in rest] == [None, None, FinishReason.LENGTH]
    sent, received = pair.prefill.role.kv_bytes[0], pair.decode.role.kv_bytes[1]
    assert sent == received == 8 * len(PROMPT)
    everything_is_back(pair)


def test_each_leg_says_its_usage_once(pair):
    pair.send(pair.ask("r", PROMPT, 4, room=1))
    pair.settle()
    for leg in ("prefill", "decode"):
        usages = [chunk.usage for chunk in pair.of(leg, "r")]
        assert usages[0] == Usage(prompt_tokens=len(PROMPT))
        assert not any(usages[1:])


def test_kv_that_the_decode_rank_has_is_not_sent_again(pair):
    pair.send(pair.ask("r", PROMPT, 4, room=1))
    pair.settle()
    before = pair.prefill.role.kv_bytes[0]
    pair.send(pair.ask("again", [*PROMPT, 9], 4, room=2))
    pair.settle()
    assert pair.prefill.role.kv_bytes[0] - before == 8
    assert pair.asked["again"].output == generate([*PROMPT, 9], 4)


def test_a_request_for_one_token_moves_no_kv(pair):
    pair.send(pair.ask("r", PROMPT, 1, room=1))
    pair.settle()
    (said,) = pair.of("prefill", "r")
    assert (said.token_ids, said.finish) == (tuple(generate(PROMPT, 1)), FinishReason.LENGTH)
    (ended,) = pair.of("decode", "r")
    assert (ended.token_ids, ended.finish, ended.last) == ((), None, True)
    assert pair.prefill.role.kv_bytes == (0, 0)
    assert pair.decode.role.kv_bytes == (0, 0)
    everything_is_back(pair)


def test_a_stop_token_at_once_ends_both_legs(pair):
    (first,) = generate(PROMPT, 1)
    pair.send(pair.ask("r", PROMPT, 9, room=1, stop_token_ids=(first,)))
    pair.settle()
    (said,) = pair.of("prefill", "r")
    assert (said.token_ids, said.finish) == ((first,), FinishReason.STOP)
    (ended,) = pair.of("decode", "r")
    assert (ended.token_ids, ended.finish) == ((), FinishReason.STOP)
    everything_is_back(pair)


def test_a_prefill_rank_holds_the_pages_until_a_decode_rank_has_them(pair):
    wanted = pair.ask("r", PROMPT, 4, room=1)
    pair.send(wanted, pair.prefill)
    pair.step(pair.prefill, len(PROMPT))
    sequence = pair.prefill.streams.find("r")
    assert sequence.state is SequenceState.SENDING
    assert pair.of("prefill", "r")  # the first token does not wait for the decode rank
    assert pair.prefill.scheduler.cache.flush() == 0
    assert pair.prefill.load().handoff_requests == 1
    pair.send(wanted, pair.decode)
    pair.settle()
    assert pair.asked["r"].output == generate(PROMPT, 4)
    everything_is_back(pair)


def test_a_refusal_at_the_prefill_rank_ends_the_decode_leg_too(pair):
    pair.send(pair.ask("r", PROMPT, 4, room=1), pair.prefill)
    pair.send(pair.ask("r", PROMPT, 4, room=2))  # the same id once more
    pair.settle()
    (refused,) = pair.of("decode", "r")
    assert refused.finish is FinishReason.ERROR
    assert refused.error.kind is ErrorKind.INVALID
    assert "in use" in refused.error.message
    assert len(pair.decode.streams) == 0


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_room_in_use_is_refused_and_its_owner_goes_on(pair, leg):
    owner, other = pair.ask("r", PROMPT, 4, room=1), pair.ask("other", [7, 8, 9], 4, room=1)
    pair.send(owner)
    engine = pair.prefill if leg == "prefill" else pair.decode
    pair.step(engine)
    pair.send(other, engine)
    pair.settle()
    (refused,) = pair.of(leg, "other")
    assert refused.finish is FinishReason.ERROR
    assert "room" in refused.error.message
    assert pair.asked["r"].output == generate(PROMPT, 4)
    everything_is_back(pair)


def test_an_abort_before_the_kv_came_gives_the_pages_back(pair):
    wanted = pair.ask("r", PROMPT, 4, room=1)
    pair.send(wanted, pair.decode)
    pair.step(pair.decode)
    assert pair.decode.streams.find("r").state is SequenceState.AWAITING_KV
    assert pair.decode.scheduler.cache.account().owned == len(PROMPT)
    pair.decode.handle(Aborted("a", "r"))
    pair.step(pair.decode)
    (chunk,) = pair.of("decode", "r")
    assert chunk.finish is FinishReason.ABORT
    assert pair.decode.scheduler.cache.account().owned == len(PROMPT)  # a write may still come
    pair.send(wanted, pair.prefill)
    pair.settle()
    everything_is_back(pair)


@pytest.fixture
def local():
    """A pair that has handed over once; from now on the decode rank computes up to 8 tokens."""
    pair = CalmPair(local=8)
    pair.send(pair.ask("first", [40, 41], 2, room=99))
    pair.settle()
    assert pair.decode.role.transfers().placed == {"remote_first": 1}
    return pair


def test_a_short_remainder_is_computed_by_the_decode_rank(local):
    before = local.prefill.role.kv_bytes
    local.send(local.ask("r", PROMPT, 4, room=1), local.decode)
    local.step(local.decode, 20)
    said = local.of("decode", "r")
    tokens = generate(PROMPT, 4)
    assert [(c.offset, *c.token_ids) for c in said] == list(enumerate(tokens))
    assert said[0].usage == Usage(prompt_tokens=5, cached_tokens=0)
    assert said[-1].finish is FinishReason.LENGTH
    while local.to_prefill:
        local._hear()
    local.send(local.ask("r", PROMPT, 4, room=1), local.prefill)
    local.settle()
    (left,) = local.of("prefill", "r")
    assert (left.token_ids, left.finish, left.last, left.usage) == ((), None, True, None)
    assert local.prefill.role.kv_bytes == before
    assert local.decode.role.transfers().placed == {"remote_first": 1, "local": 1}
    everything_is_back(local)


def test_a_declined_prompt_is_dropped_while_it_is_computed(local):
    wanted = local.ask("r", list(range(30)), 4, room=1)
    local.send(local.ask("warm", list(range(25)), 2, room=2))
    local.settle()
    local.prefill.scheduler.cache.flush()
    local.send(wanted, local.prefill)
    local.step(local.prefill)
    assert local.prefill.streams.find("r").state is SequenceState.RUNNING
    local.send(wanted, local.decode)
    local.step(local.decode)
    while local.to_prefill:
        local._hear()
    local.step(local.prefill)
    assert local.prefill.streams.find("r") is None
    (left,) = local.of("prefill", "r")
    assert (left.token_ids, left.last, left.error) == ((), True, None)
    local.settle()
    assert local.asked["r"].output == generate(list(range(30)), 4)
    assert local.of("decode", "r")[0].usage == Usage(prompt_tokens=30, cached_tokens=25)
    everything_is_back(local)


def test_a_prompt_that_is_wholly_held_computes_its_last_token_again(local):
    for n, rid in enumerate(("one", "two"), 1):
        local.send(local.ask(rid, PROMPT, 3, room=n))
        local.settle()
        assert local.asked[rid].output == generate(PROMPT, 3)
    assert local.of("decode", "two")[0].usage == Usage(prompt_tokens=5, cached_tokens=4)
    everything_is_back(local)


def test_a_long_prompt_crosses_and_a_new_link_is_proven_anew(local):
    local.send(local.ask("long", list(range(20, 30)), 3, room=1))
    local.settle()
    local.break_link()
    local.send(local.ask("short", [9, 8], 3, room=2))
    local.settle()
    assert local.asked["short"].output == generate([9, 8], 3)
    placed = local.decode.role.transfers().placed
    assert placed == {"remote_first": 2, "remote_long": 1}
    everything_is_back(local)


def test_an_abort_of_what_is_computed_here_gives_the_pages_back(local):
    local.send(local.ask("r", PROMPT, 9, room=1))
    local.step(local.decode, 2)
    local.decode.handle(Aborted("a", "r"))
    local.prefill.handle(Aborted("a", "r"))
    local.settle()
    everything_is_back(local)


def test_scores_of_a_prompt_that_is_computed_here_come_with_the_first_token(local):
    wanted = local.ask("r", PROMPT, 3, room=1, prompt_logprobs=0)
    local.send(wanted, local.decode)
    local.step(local.decode)
    while local.to_prefill:
        local._hear()
    local.send(wanted, local.prefill)
    local.settle()
    first, *rest = local.of("decode", "r")
    assert len(first.prompt_logprobs) == len(PROMPT) - 1
    assert not any(chunk.prompt_logprobs for chunk in rest)
    assert not any(chunk.prompt_logprobs for chunk in local.of("prefill", "r"))


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_message_that_cannot_be_read_costs_the_link_and_not_the_rank(pair, leg, caplog):
    dropped: list[str] = []
    engine = pair.prefill if leg == "prefill" else pair.decode
    engine.drop_peer = dropped.append
    engine.handle(PeerMessage("link0", b"\xc1"))
    assert dropped == ["link0"]
    assert "link0" in caplog.text
    pair.send(pair.ask("r", PROMPT, 4, room=1))
    pair.settle()
    assert pair.asked["r"].output == generate(PROMPT, 4)


def test_a_decode_rank_asks_for_no_more_kv_than_it_can_run(pair):
    most = pair.decode.scheduler.limits.max_running
    for n in range(most + 2):
        pair.send(pair.ask(f"r{n}", [n, 1], 4, room=1 + n), pair.decode)
    pair.step(pair.decode)
    assert pair.decode.role.counts() == {"pending": 2, "announced": most}
    assert pair.decode.load().waiting_requests == 2


def test_unclaimed_prompts_leave_room_and_the_rank_sleeps_when_all_that_wait_are_unclaimed(pair):
    prompts = {f"r{n}": [n, *range(20, 20 + CONTEXT - 10)] for n in range(8)}
    wanted = [pair.ask(rid, ids, 3, room=n) for n, (rid, ids) in enumerate(prompts.items(), 1)]
    for each in wanted:
        pair.send(each, pair.prefill)
    for _ in range(500):
        pair.step(pair.prefill)
        if pair.prefill.idle:
            break
    cache = pair.prefill.scheduler.cache
    assert pair.prefill.idle
    assert len(pair.prefill.scheduler.waiting)
    assert cache.available >= CONTEXT  # whatever is claimed next can be computed
    for each in wanted:
        pair.send(each, pair.decode)
    pair.settle(300)
    for rid, ids in prompts.items():
        assert pair.asked[rid].output == generate(ids, 3)
    everything_is_back(pair)


def test_a_page_is_sent_when_it_is_full_or_the_prompt_ends():
    """Until then the tree may have the same page from somebody else, and take this one away."""
    pair = CalmPair(page_size=4)
    pair.prefill.scheduler.limits = replace(pair.prefill.scheduler.limits, step_tokens=3)
    prompt = list(range(10))
    pair.send(pair.ask("r", prompt, 4, room=1))
    sent = []
    for _ in range(4):
        pair.step(pair.prefill)
        sent.append(pair.prefill.role.transfers().held_pages)
    assert sent == [0, 1, 2, 3]
    pair.settle()
    assert pair.asked["r"].output == generate(prompt, 4)
    everything_is_back(pair)


def test_of_a_page_that_the_decode_rank_has_in_part_the_rest_is_sent():
    pair = CalmPair(page_size=4)
    pair.send(pair.ask("r", PROMPT, 3, room=1))
    pair.settle()
    before = pair.prefill.role.kv_bytes[0]
    longer = [*PROMPT, *generate(PROMPT, 3), 9]  # and the decode rank has 7
    pair.send(pair.ask("again", longer, 4, room=2))
    pair.settle()
    assert pair.prefill.role.kv_bytes[0] - before == 8 * 2
    assert pair.local._handoffs[-1][0] == 2  # what the handoff is measured by
    assert pair.asked["again"].output == generate(longer, 4)
    everything_is_back(pair)


def test_a_step_that_only_copies_says_nothing_of_what_a_step_costs():
    pair = CalmPair(page_size=4)
    pair.send(pair.ask("r", PROMPT[:2], 2, room=1))
    pair.settle()
    plain_s = pair.local._plain_s
    pair.send(pair.ask("again", [*PROMPT[:2], 9], 2, room=2), pair.decode)
    steps = pair.decode.steps
    pair.step(pair.decode)
    assert pair.decode.steps == steps + 1
    assert pair.local._plain_s == plain_s


@pytest.mark.parametrize(
    ("pages", "started"),
    [(3, 0), (7, 1), (8, 2)],  # of 16 slots; a context of 40 tokens is three pages, a prompt two
)
def test_what_is_started_before_it_is_claimed_is_counted_in_pages(pages, started):
    """Every claimed request must fit beside it."""
    pair = CalmPair(page_size=16)
    pair.random.seed(3)
    engine = pair._engine("prefill", pages=16 * pages)
    engine.scheduler.limits = replace(engine.scheduler.limits, step_tokens=100)
    for room in range(3):
        pair.send(pair.ask(f"r{room}", [room] * 17, 4, room=room), engine)
    engine.step(0.0)
    assert sum(s.row != NO_ROW for s in engine.streams.sequences()) == started
