"""The arithmetic of latencies, throughput and goodput, on outcomes made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench.config import Targets
from bench.outcome import Outcome
from bench.stats import is_good, spread, summarise


def outcome(start_s=0.0, chunks=(0.5, 0.6, 0.8), end_s=0.9, **fields):
    given = {
        "prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 5, "finish": "length",
    } | fields  # fmt: skip
    at_s = tuple(start_s + chunk for chunk in chunks)
    return Outcome(
        session=0, turn=0, due_s=start_s, start_s=start_s, end_s=start_s + end_s, chunk_s=at_s,
        **given,
    )  # fmt: skip


def test_the_latencies_of_a_request():
    one = outcome(start_s=10.0)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.itl_s == pytest.approx([0.1, 0.2])
    assert one.tpot_s == pytest.approx(0.1)  # 0.3 s for the 3 tokens after the first
    assert one.e2e_s == pytest.approx(0.9)


def test_an_answer_without_text_is_there_at_its_end():
    empty = outcome(chunks=(), completion_tokens=1)
    assert empty.ttft_s == pytest.approx(0.9)
    assert empty.itl_s == []
    assert empty.tpot_s is None


def test_percentiles_are_numpys():
    values = np.random.default_rng(0).exponential(size=101).tolist()
    got = spread(values)
    assert got.mean == pytest.approx(1e3 * np.mean(values))
    assert got.p50 == pytest.approx(1e3 * sorted(values)[50])
    assert got.p90 == pytest.approx(1e3 * sorted(values)[90])
    assert got.p99 == pytest.approx(1e3 * np.quantile(values, 0.99))
    assert spread([]) is None


def test_throughput_counts_from_the_first_start_to_the_last_end():
    summary = summarise([outcome(0.0), outcome(1.1, prompt_tokens=30)], Targets())
    assert summary.duration_s == pytest.approx(2.0)
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.output_tokens == 8
    assert summary.output_tokens_per_s == pytest.approx(4.0)
    assert summary.prompt_tokens == 40
    assert summary.total_tokens_per_s == pytest.approx(24.0)
    assert summary.cached_share == pytest.approx(10 / 40)
    assert summary.in_flight == pytest.approx(0.9)
    assert summary.output_tokens_from == "usage"
    assert summary.goodput is None


def test_failed_requests_count_by_their_text_and_not_in_latencies():
    bad = outcome(chunks=(0.1,), error="HTTP 429: busy")
    summary = summarise([bad, outcome(), bad, outcome(error="cut")], Targets())
    assert (summary.requests, summary.ok, summary.failed) == (4, 1, 3)
    assert list(summary.errors.items()) == [("HTTP 429: busy", 2), ("cut", 1)]
    assert summary.ttft_ms.p50 == pytest.approx(500)
    assert summary.output_tokens == 4


def test_errors_that_differ_in_numbers_are_one():
    texts = ["HTTP 400: 12 is too long", "HTTP 400: 7 is too long", "HTTP 500: 12 is too long"]
    summary = summarise([outcome(error=text) for text in texts], Targets())
    assert list(summary.errors.items()) == [(texts[0], 2), (texts[2], 1)]


def test_without_usage_chunks_are_counted_and_said_to_be():
    bare = outcome(prompt_tokens=None, completion_tokens=None, cached_tokens=None)
    summary = summarise([bare, outcome()], Targets())
    assert summary.output_tokens == 3 + 4
    assert summary.output_tokens_from == "chunks"
    assert summary.prompt_tokens is None
    assert summary.total_tokens_per_s is None


def test_nothing_went_well():
    summary = summarise([outcome(error="x")], Targets(ttft_ms=1.0))
    assert summary.ok == 0
    assert summary.ttft_ms is summary.itl_ms is summary.prompt_tokens is None
    assert summary.goodput.share == 0


@pytest.mark.parametrize(
    ("targets", "good"),
    [
        (Targets(ttft_ms=501), True),
        (Targets(ttft_ms=499), False),
        (Targets(tpot_ms=101), True),
        (Targets(tpot_ms=99), False),
        (Targets(itl_ms=200.1), True),
        (Targets(itl_ms=198), False),  # p99 of 100 and 200 ms is 199
        (Targets(ttft_ms=501, tpot_ms=99), False),
        (Targets(ttft_ms=501, tpot_ms=101, itl_ms=200), True),
    ],
)
def test_a_good_request_meets_every_target(targets, good):
    assert is_good(outcome(), targets) is good
    assert not is_good(outcome(error="x"), targets)


def test_what_an_answer_is_too_short_for_is_met():
    short = outcome(chunks=(0.1,), completion_tokens=1)
    assert is_good(short, Targets(tpot_ms=0.001, itl_ms=0.001))


def test_goodput_is_a_share_of_all_and_a_rate():
    slow = outcome(1.1, chunks=(0.7, 0.8))
    summary = summarise([outcome(0.0), slow, outcome(error="x"), outcome()], Targets(ttft_ms=600))
    assert summary.goodput.requests == 2
    assert summary.goodput.share == pytest.approx(0.5)
    assert summary.goodput.per_s == pytest.approx(1.0)


def test_lateness_is_the_load_generators():
    late = Outcome(session=0, turn=0, due_s=1.0, start_s=1.25, end_s=2.0)
    assert summarise([late], Targets()).late_p99_ms == pytest.approx(250)
