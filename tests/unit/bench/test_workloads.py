"""Workloads are decided by their seed and have the shapes they promise."""

from __future__ import annotations

from collections import Counter

import pytest

from bench import workloads
from bench.config import BenchConfig
from bench.words import IdVocabulary, Span, WordVocabulary


def prompts(config: BenchConfig) -> list[str]:
    vocabulary = WordVocabulary()
    return [vocabulary.render(turn.spans) for s in workloads.build(config) for turn in s.turns]


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("kind", ["random", "shared-prefix", "multi-turn"])
def test_the_seed_decides_everything(kind):
    one = BenchConfig(workload=kind, requests=7, spread=0.5, seed=3)
    other = BenchConfig(workload=kind, requests=7, spread=0.5, seed=4)
    assert workloads.build(one) == workloads.build(one)
    assert prompts(one) == prompts(one)
    assert not set(prompts(one)) & set(prompts(other))


def test_random_prompts_share_nothing_and_have_the_lengths():
    texts = prompts(BenchConfig(requests=20, input_tokens=50))
    assert [len(words(text)) for text in texts] == [50] * 20
    assert len({tuple(words(text)[:4]) for text in texts}) == 20


def test_spread_draws_lengths_around_the_mean():
    config = BenchConfig(requests=300, input_tokens=100, output_tokens=10, spread=0.5)
    turns = [session.turns[0] for session in workloads.build(config)]
    inputs = [turn.spans[0].length for turn in turns]
    assert min(inputs) >= 50
    assert max(inputs) <= 150
    assert 95 < sum(inputs) / 300 < 105
    assert {turn.output_tokens for turn in turns} == set(range(5, 16))


def test_each_prefix_is_shared_by_as_many_requests():
    config = BenchConfig(
        workload="shared-prefix", requests=24, prefixes=4, prefix_tokens=30, input_tokens=5
    )
    texts = [words(text) for text in prompts(config)]
    assert all(len(text) == 35 for text in texts)
    groups = [tuple(text[:30]) for text in texts]
    assert sorted(Counter(groups).values()) == [6] * 4
    assert groups != sorted(groups)  # shuffled, not one group after the other
    assert len({tuple(text[30:]) for text in texts}) == 24


def test_conversations_share_a_prefix_and_hold_all_requests():
    config = BenchConfig(
        workload="multi-turn", requests=8, turns=3, prefix_tokens=9, input_tokens=4
    )
    sessions = workloads.build(config)
    assert [len(session.turns) for session in sessions] == [3, 3, 2]
    assert len({session.turns[0].spans[0] for session in sessions}) == 1
    later = [turn for session in sessions for turn in session.turns[1:]]
    assert all(len(turn.spans) == 1 for turn in later)


def test_without_a_prefix_length_there_is_no_prefix():
    config = BenchConfig(workload="shared-prefix", requests=2, prefix_tokens=0)
    assert all(len(session.turns[0].spans) == 1 for session in workloads.build(config))


def test_warm_up_shares_nothing_with_the_run():
    config = BenchConfig(workload="shared-prefix", requests=4, warmup=3)
    warm = workloads.warmup(config)
    assert len(warm) == 3
    keys = {span.key for s in workloads.build(config) for span in s.turns[0].spans}
    assert not keys & {span.key for session in warm for span in session.turns[0].spans}


def test_a_shorter_span_is_the_start_of_a_longer_one():
    for vocabulary in (WordVocabulary(), IdVocabulary(10, 500)):
        long, short = vocabulary.render([Span("k", 40)]), vocabulary.render([Span("k", 17)])
        assert long[: len(short)] == short


def test_ids_have_the_exact_length_and_range():
    ids = IdVocabulary(7, 11).render([Span("a", 100), Span("b", 100)])
    assert len(ids) == 200
    assert set(ids) == {7, 8, 9, 10}


def test_the_words_are_distinct():
    text = WordVocabulary().render([Span("k", 20_000)])
    assert text.startswith(" ")
    assert len(set(words(text))) == 1024
