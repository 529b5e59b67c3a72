"""Recorded traffic becomes sessions whose shared blocks are shared tokens."""

from __future__ import annotations

import pytest

from bench import traces, workloads
from bench.config import BenchConfig
from bench.words import IdVocabulary
from core.errors import ConfigError

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1024, "output_length": 26, "hash_ids": [0, 1]}

{"timestamp": 3000, "input_length": 700, "output_length": 1, "hash_ids": [0, 9]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def trace_config(tmp_path, text, name="t.jsonl", **fields):
    path = tmp_path / name
    path.write_text(text)
    return BenchConfig(workload="trace", trace=str(path), **fields)


def rendered(sessions):
    vocabulary = IdVocabulary(0, 50_000)
    return [vocabulary.render(session.turns[0].spans) for session in sessions]


def test_equal_hash_ids_are_equal_blocks_of_512_tokens(tmp_path):
    sessions = workloads.build(trace_config(tmp_path, MOONCAKE))
    first, second, third = rendered(sessions)
    assert [len(first), len(second), len(third)] == [1100, 1024, 700]
    assert first[:1024] == second
    assert first[:512] == third[:512]
    assert first[512:516] != third[512:516]
    assert [session.at_s for session in sessions] == [0, 1.5, 3]
    assert [session.turns[0].output_tokens for session in sessions] == [52, 26, 1]


def test_scaled_lengths_keep_what_is_shared(tmp_path):
    sessions = workloads.build(trace_config(tmp_path, MOONCAKE, length_scale=0.125))
    first, second, third = rendered(sessions)
    assert [len(first), len(second), len(third)] == [128 + 10, 128, 64 + 24]
    assert first[:128] == second
    assert first[:64] == third[:64]
    assert [session.turns[0].output_tokens for session in sessions] == [6, 3, 1]


def test_the_seed_changes_the_tokens_and_requests_cuts_the_trace(tmp_path):
    one = workloads.build(trace_config(tmp_path, MOONCAKE, requests=2))
    other = workloads.build(trace_config(tmp_path, MOONCAKE, requests=2, seed=1))
    assert len(one) == len(other) == 2
    assert rendered(one) != rendered(other)


def test_azure_rows_are_arrivals_and_lengths(tmp_path):
    sessions = workloads.build(trace_config(tmp_path, AZURE, "t.csv"))
    assert [len(ids) for ids in rendered(sessions)] == [374, 396]
    assert sessions[0].at_s == 0
    assert sessions[1].at_s == pytest.approx(4.314579)
    assert [session.turns[0].output_tokens for session in sessions] == [44, 109]


def test_sessions_are_sorted_by_time(tmp_path):
    lines = MOONCAKE.splitlines(keepends=True)
    sessions = traces.read(trace_config(tmp_path, "".join(reversed(lines))))
    assert [session.at_s for session in sessions] == [0, 1.5, 3]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", MOONCAKE + "{}\n", "line 5: .*timestamp"),
        ("t.jsonl", MOONCAKE.replace("[0, 9]", "[0]"), "line 4: 700 tokens need 2 hash_ids, not 1"),
        ("t.jsonl", MOONCAKE.replace("1024", "0"), "line 2: 0 tokens need some hash_ids, not 2"),
        ("t.jsonl", "", "no requests"),
        ("t.csv", "a,b\n1,2\n", "line 2: not a row"),
        ("t.csv", AZURE + "yesterday,1,2\n", "line 4: not a row"),
        ("t.txt", "", "must be .jsonl .* or .csv"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path, name, text, words):
    with pytest.raises(ConfigError, match=words):
        workloads.build(trace_config(tmp_path, text, name))


def test_a_missing_trace_is_an_operators_error(tmp_path):
    config = BenchConfig(workload="trace", trace=str(tmp_path / "none.csv"))
    with pytest.raises(ConfigError, match=r"none\.csv"):
        workloads.build(config)
