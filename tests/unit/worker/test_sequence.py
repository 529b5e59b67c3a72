from __future__ import annotations

import itertools

import pytest

from core.wire import FinishReason
from tests.support.requests import request
from worker.sequence import LEGAL, Sequence, SequenceState

EOS = 7


def after(token: int, *, max_new: int = 5, context_len: int = 100, **params: object) -> Sequence:
    """A prompt of three tokens and one generated token."""
    sequence = Sequence.of(request("r", [1, 2, 3], max_new, **params), "router", context_len)
    sequence.append(token)
    return sequence


@pytest.mark.parametrize(
    ("sequence", "reason"),
    [
        (after(4), None),
        (after(EOS), FinishReason.STOP),
        (after(EOS, ignore_eos=True), None),
        (after(4, stop_token_ids=(4,)), FinishReason.STOP),
        (after(EOS, stop_token_ids=(EOS,), ignore_eos=True), FinishReason.STOP),
        (after(4, max_new=1), FinishReason.LENGTH),
        (after(EOS, max_new=1), FinishReason.STOP),
    ],
)
def test_why_a_sequence_ends(sequence, reason):
    assert sequence.finish_reason(frozenset({EOS}), 100) is reason


def test_a_full_context_ends_a_sequence():
    assert after(4, context_len=4).finish_reason(frozenset(), 4) is FinishReason.LENGTH
    assert after(4, context_len=5).finish_reason(frozenset(), 5) is None


def test_a_sequence_has_room_for_all_it_may_ever_hold():
    sequence = Sequence.of(request("r", [1, 2, 3], 4), "router", 100)
    for token in range(4):
        sequence.append(token)
    assert sequence.ids.tolist() == [1, 2, 3, 0, 1, 2, 3]
    assert sequence.output_len == sequence.generated_here == 4
    assert sequence.remaining == 7


def test_output_generated_elsewhere_counts_as_output_and_not_as_ours():
    sequence = Sequence.of(request("r", [1, 2, 3, 4], 4, prompt_len=2), "router", 100)
    sequence.append(5)
    assert (sequence.output_len, sequence.generated_here) == (3, 1)


@pytest.mark.parametrize(("start", "to"), [*itertools.product(SequenceState, repeat=2)])
def test_only_legal_moves_are_made(start, to):
    sequence = Sequence.of(request("r", [1], 1), "router", 10)
    sequence.state = start
    if to in LEGAL[start]:
        sequence.move(to)
        assert sequence.state is to
    else:
        with pytest.raises(AssertionError, match="not a legal move"):
            sequence.move(to)


def test_nothing_leaves_the_last_state_and_every_other_can_reach_it():
    assert not LEGAL[SequenceState.FINISHED]
    for state in set(SequenceState) - {SequenceState.FINISHED}:
        assert SequenceState.FINISHED in LEGAL[state]
