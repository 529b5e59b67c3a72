"""Where a prompt's remainder is computed, by what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from worker.roles.local_prefill import PROBE_TOKENS, LocalPrefill, Place

BUDGET = 256


def measured(token_s=0.001, handoff_s=0.02) -> LocalPrefill:
    rule = LocalPrefill("auto", BUDGET)
    rule.stepped(100, 0, 100 * token_s)
    rule.handed_over(500, 500 * token_s + handoff_s)
    return rule


def test_off_is_off_and_a_number_is_a_limit():
    assert LocalPrefill("off", BUDGET).place(1, proven=True) is Place.OFF
    rule = LocalPrefill(10, BUDGET)
    assert rule.place(10, proven=True) is Place.LOCAL
    assert rule.place(11, proven=True) is Place.LONG


@pytest.mark.parametrize("mode", ["auto", 100])
def test_the_first_prompt_of_a_pair_is_handed_over(mode):
    assert LocalPrefill(mode, BUDGET).place(1, proven=False) is Place.FIRST


def test_auto_keeps_what_is_computed_sooner_than_handed_over():
    rule = measured(token_s=0.001, handoff_s=0.02)
    assert 19 <= rule.threshold <= 20
    assert rule.place(19, proven=True) is Place.LOCAL
    assert rule.place(21, proven=True) is Place.LONG


def test_auto_probes_what_a_token_costs():
    rule = LocalPrefill("auto", BUDGET)
    assert rule.threshold == 0, "nothing was handed over yet"
    rule.handed_over(500, 1.0)
    assert rule.threshold == PROBE_TOKENS
    rule.stepped(PROBE_TOKENS, 0, PROBE_TOKENS * 0.002)
    assert rule.threshold == 0, "1 s for 500 tokens is what computing them takes"


def test_a_threshold_is_never_more_than_a_step():
    assert measured(token_s=1e-6, handoff_s=10.0).threshold == BUDGET


def test_beside_decode_rows_a_prompt_costs_what_the_step_takes_longer():
    rule = LocalPrefill("auto", BUDGET)
    rule.stepped(0, 4, 0.5)
    rule.stepped(100, 4, 0.6)
    assert rule.token_s == pytest.approx(0.001)


def test_one_slow_handoff_changes_nothing_and_a_lasting_change_does():
    rule = measured(handoff_s=0.02)
    for _ in range(4):
        rule.handed_over(0, 0.02)
    rule.handed_over(0, 30.0)
    assert rule.handoff_s == pytest.approx(0.02)
    for _ in range(20):
        rule.handed_over(0, 0.1)
    assert rule.threshold == 100


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(0, 512), st.integers(0, 8), st.floats(0, 60)),
            st.tuples(st.just("handoff"), st.integers(0, 9999), st.floats(0, 1e6)),
        )
    ),
    st.integers(0, 10_000),
)
def test_whatever_was_measured_the_threshold_is_a_number_of_tokens(events, remainder):
    rule = LocalPrefill("auto", BUDGET)
    for kind, *values in events:
        (rule.stepped if kind == "step" else rule.handed_over)(*values)
    assert 0 <= rule.threshold <= BUDGET
    local = rule.place(remainder, proven=True) is Place.LOCAL
    assert local == (remainder <= rule.threshold)
