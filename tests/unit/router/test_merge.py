from __future__ import annotations

import numpy as np

from core.wire import (
    ErrorKind,
    FinishReason,
    Role,
    StreamError,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from router.merge import OutputMerge


def chunk(offset, *tokens, **fields):
    return TokenChunk(rid="leg", offset=offset, token_ids=tokens, **fields)


def merge():
    return OutputMerge("r", np.array([7, 8, 9], dtype="<i4"))


def test_what_is_early_is_held_until_the_gap_is_filled():
    output = merge()
    assert output.accept(Role.DECODE, chunk(3, 13, finish=FinishReason.LENGTH)) == []
    assert output.accept(Role.DECODE, chunk(1, 11, 12)) == []
    ready = output.accept(Role.PREFILL, chunk(0, 10, last=True))
    assert [(c.offset, c.token_ids, c.finish) for c in ready] == [
        (0, (10,), None),
        (1, (11, 12), None),
        (3, (13,), FinishReason.LENGTH),
    ]
    assert {c.rid for c in ready} == {"r"}
    assert output.finished
    assert output.accept(Role.DECODE, chunk(4, 14)) == []


def test_repeats_are_cut_off_with_their_logprobs():
    output = merge()
    logprobs = tuple(TokenLogprob(logprob=-float(i)) for i in range(3))
    output.accept(Role.PREFILL, chunk(0, 10, last=True))
    (ready,) = output.accept(Role.DECODE, chunk(0, 10, 11, 12, logprobs=logprobs))
    assert (ready.offset, ready.token_ids, ready.logprobs) == (1, (11, 12), logprobs[1:])
    assert output.accept(Role.DECODE, chunk(1, 11, 12)) == []
    assert output.token_ids().tolist() == [7, 8, 9, 10, 11, 12]


def test_a_first_token_that_ends_the_output_wins_over_what_was_held():
    output = merge()
    output.accept(Role.DECODE, chunk(1, 11))
    (ready,) = output.accept(Role.PREFILL, chunk(0, 10, finish=FinishReason.STOP))
    assert (ready.token_ids, ready.finish) == ((10,), FinishReason.STOP)


def test_usage_comes_once_with_the_first_chunk_and_the_prefill_legs_cache():
    output = merge()
    first = Usage(prompt_tokens=3, cached_tokens=2)
    (begin,) = output.accept(Role.PREFILL, chunk(0, 10, last=True, usage=first))
    assert begin.usage == first
    output.restart()
    second = Usage(prompt_tokens=4, cached_tokens=4)
    output.accept(Role.PREFILL, chunk(1, 11, last=True, usage=second))
    decode = Usage(prompt_tokens=4, cached_tokens=3)
    (end,) = output.accept(Role.DECODE, chunk(2, 12, finish=FinishReason.LENGTH, usage=decode))
    assert end.usage is None


def test_errors_and_aborts_end_at_once_whatever_their_offset():
    for reason in (FinishReason.ERROR, FinishReason.ABORT):
        output = merge()
        error = StreamError(kind=ErrorKind.INTERNAL, message="a defect")
        (end,) = output.accept(Role.DECODE, chunk(5, finish=reason, error=error))
        assert (end.offset, end.finish, end.error) == (0, reason, error)


def test_restart_forgets_what_the_lost_attempt_left():
    output = merge()
    output.accept(Role.DECODE, chunk(1, 11))
    output.restart()
    assert len(output.accept(Role.PREFILL, chunk(0, 10, last=True))) == 1


def test_the_usage_of_a_decode_leg_counts_where_it_computed_the_prompt():
    output = merge()
    output.accept(Role.PREFILL, chunk(0, last=True))  # declined: it has computed nothing
    usage = Usage(prompt_tokens=3, cached_tokens=1)
    (begin,) = output.accept(Role.DECODE, chunk(0, 10, usage=usage))
    assert begin.usage == usage
    assert output.local


def test_each_attempt_shows_anew_where_its_prompt_is_computed():
    output = merge()
    output.accept(Role.DECODE, chunk(0, 10, 11))
    assert output.local
    output.restart()
    assert not output.local
    output.accept(Role.DECODE, chunk(3, 13))
    assert not output.local
    output.accept(Role.DECODE, chunk(2, 12))
    assert output.local
