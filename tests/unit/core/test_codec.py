"""Wire types survive the wire, and nothing malformed gets in."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from core import codec, wire

numbers = st.integers(0, 2**31 - 1)
names = st.text(max_size=12)
ranks = st.builds(wire.RankId, group=names, replica=numbers, rank=numbers)
lives = st.builds(wire.Incarnation, rank=ranks, endpoint=names, nonce=names)
params = st.builds(
    wire.SamplingParams,
    max_new_tokens=numbers,
    temperature=st.floats(0, 10),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(numbers, max_size=3).map(tuple),
)
requests = st.builds(
    wire.TokenRequest,
    rid=names,
    token_ids=st.lists(numbers, max_size=8).map(wire.pack_ids),
    prompt_len=numbers,
    params=params,
    route=st.builds(wire.Route, room=st.integers(0, 2**63 - 1), prefill=lives, decode=lives),
)
to_rank = st.one_of(
    st.builds(wire.Hello, version=numbers, router=names),
    st.builds(wire.Submit, request=requests),
    st.builds(wire.Abort, rid=names),
    st.just(wire.Ping()),
)
logprobs = st.builds(
    wire.TokenLogprob,
    logprob=st.floats(-100, 0),
    top=st.lists(
        st.builds(wire.TopLogprob, token_id=numbers, logprob=st.floats(-100, 0)), max_size=2
    ).map(tuple),
)
chunks = st.builds(
    wire.TokenChunk,
    rid=names,
    offset=numbers,
    token_ids=st.lists(numbers, max_size=4).map(tuple),
    logprobs=st.lists(logprobs, max_size=2).map(tuple),
    finish=st.none() | st.sampled_from(wire.FinishReason),
    last=st.booleans(),
    usage=st.none() | st.builds(wire.Usage, prompt_tokens=numbers),
    error=st.none()
    | st.builds(wire.StreamError, kind=st.sampled_from(wire.ErrorKind), message=names),
)
reports = st.builds(
    wire.StepReport,
    chunks=st.lists(chunks, max_size=3).map(tuple),
    load=st.builds(wire.LoadReport, waiting_tokens=numbers, kv_bytes_sent=numbers),
)


@given(to_rank)
def test_what_a_router_sends_comes_back_equal(message):
    both = codec.to_rank_codec()
    assert both.decode(both.encode(message)) == message


@given(reports)
def test_what_a_rank_sends_comes_back_equal(message):
    both = codec.to_router_codec()
    assert both.decode(both.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        {"type": "nothing"},
        {"type": "abort"},
        {"type": "abort", "rid": 7},
        {"type": "hello", "version": "1", "router": "r"},
        ["abort", "x"],
    ],
)
def test_a_malformed_message_is_refused(message):
    with pytest.raises(msgspec.ValidationError):
        codec.to_rank_codec().decode(msgspec.msgpack.encode(message))


def test_a_cut_message_is_refused():
    data = codec.to_rank_codec().encode(wire.Abort(rid="a-request"))
    with pytest.raises(msgspec.DecodeError):
        codec.to_rank_codec().decode(data[:-1])


def test_a_newer_field_is_ignored():
    """A rolling upgrade: the other side may know fields that we do not."""
    data = msgspec.msgpack.encode({"type": "abort", "rid": "r", "why": "newer"})
    assert codec.to_rank_codec().decode(data) == wire.Abort(rid="r")
