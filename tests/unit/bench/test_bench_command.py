"""``antiphon bench`` against an endpoint on loopback, and what its arguments turn into."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec

import pytest

from antiphon import bench_command
from antiphon.cli import main
from bench.config import BenchConfig
from core.errors import ConfigError
from tests.support.fake_openai import Answer, refuses, says, serving, usage


def echo(body) -> Answer:
    """As many words as were asked for, with counted usage; a 1-token prompt costs nothing."""
    prompt = body.get("prompt") or body["messages"][-1]["content"]
    tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    n = body["max_tokens"]
    return says(*[" yes"] * n, usage=usage(tokens, n, cached=tokens // 2))


def bench(url, *arguments):
    return main(["bench", "--url", url, *map(str, arguments)])


def test_a_run_from_arguments_to_files(tmp_path, capsys):
    files = {name: tmp_path / name for name in ("all.jsonl", "requests.jsonl", "plot.png")}
    plotting = ["--plot", files["plot.png"]] if find_spec("matplotlib") else []
    with serving(echo) as fake:
        arguments = [
            "--workload", "shared-prefix", "--requests", 12, "--prefix-tokens", 20, "--prefixes", 3,
            "--input-tokens", 10, "--output-tokens", 4, "--concurrency", 4, "--warmup", 2,
            "--target-ttft", 60_000, "--target-tpot", 60_000, "--label", "a test",
            "--json", files["all.jsonl"], "--requests-json", files["requests.jsonl"], *plotting,
        ]  # fmt: skip
        assert bench(fake.url, *arguments) == 0
        assert bench(fake.url, *arguments) == 0
    out, err = capsys.readouterr()
    assert "fake-model on http://127.0.0.1" in out
    assert "12 ok, 0 failed" in out
    assert "100.0% of the requests met the targets" in out
    assert "12/12 requests" in err
    assert len(fake.bodies) == 2 * (2 + 12)
    first, second = map(json.loads, files["all.jsonl"].read_text().splitlines())  # it appends
    assert first["config"] == second["config"]
    assert first["config"]["label"] == "a test"
    assert first["result"]["prompt_tokens"] == 12 * 30
    assert first["result"]["output_tokens"] == 12 * 4
    assert first["result"]["cached_share"] == 0.5
    assert len(files["requests.jsonl"].read_text().splitlines()) == 12
    assert files["plot.png"].exists() == bool(plotting)


def test_multi_turn_chat_really_carries_the_answers_on(capsys):
    arguments = ("--workload", "multi-turn", "--endpoint", "chat", "--requests", 6, "--turns", 3)
    with serving(echo) as fake:
        assert bench(fake.url, *arguments, "--output-tokens", 2, "--warmup", 0) == 0
    capsys.readouterr()
    assert sorted(len(body["messages"]) for body in fake.bodies) == [1, 1, 3, 3, 5, 5]
    longest = max((body["messages"] for body in fake.bodies), key=len)
    assert [m["content"] for m in longest if m["role"] == "assistant"] == [" yes yes"] * 2


def test_a_trace_is_replayed_as_ids_in_an_open_loop(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [5, 6]}\n'
        '{"timestamp": 900, "input_length": 513, "output_length": 2, "hash_ids": [5, 7]}\n'
    )
    arguments = ("--workload", "trace", "--trace", path, "--prompt-format", "ids", "--speed", 100)
    with serving(echo) as fake:
        assert bench(fake.url, *arguments, "--warmup", 0, "--id-range", 5, 4000) == 0
    capsys.readouterr()
    first, second = (body["prompt"] for body in fake.bodies)
    assert (len(first), len(second)) == (600, 513)
    assert first[:512] == second[:512]
    assert [body["max_tokens"] for body in fake.bodies] == [3, 2]


def test_some_failures_are_counted_and_all_of_them_fail_the_run(capsys):
    answers = iter([says("x"), *[refuses(429, "busy")] * 3])
    with serving(lambda _: next(answers)) as fake:
        assert bench(fake.url, "--requests", 2, "--concurrency", 1, "--warmup", 0) == 0
        assert "1 x HTTP 429: busy" in capsys.readouterr().out
        assert bench(fake.url, "--requests", 2, "--warmup", 0) == 1
    assert "2 x HTTP 429: busy" in capsys.readouterr().out


def test_a_warm_up_that_fails_stops_before_the_run(capsys):
    with serving(lambda _: refuses(404, "no such model")) as fake:
        assert bench(fake.url, "--model", "x") == 2
    assert "HTTP 404: no such model" in capsys.readouterr().err
    assert len(fake.bodies) == 1


def test_a_file_that_cannot_be_written_stops_before_the_run(tmp_path, capsys):
    with serving(echo) as fake:
        assert bench(fake.url, "--json", tmp_path / "none" / "a.jsonl") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert fake.bodies == []


def parse(*arguments):
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_every_field_has_an_argument_and_the_defaults_are_the_configurations():
    fields = set(BenchConfig.__struct_fields__) - {"targets"}
    args = vars(parse())
    assert fields <= set(args)
    assert {name for name in fields if args[name] is not None} == set()


@pytest.mark.parametrize("value", ["{", "[1]"])
def test_an_extra_body_that_is_no_object_is_refused(value, capsys):
    with pytest.raises(SystemExit):
        parse("--extra-body", value)
    assert "--extra-body" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workload": "trace"}, "--trace"),
        ({"trace": "a.csv"}, "--trace"),
        ({"rate": 1.0, "concurrency": 1}, "--rate or --concurrency"),
        ({"rate": 0.0}, "--rate"),
        ({"concurrency": 0}, "--concurrency"),
        ({"spread": 1.0}, "--spread"),
        ({"requests": 0}, "--requests"),
        ({"output_tokens": 0}, "lengths"),
        ({"warmup": -1}, "--warmup"),
        ({"speed": 0.0}, "--speed"),
        ({"timeout_s": 0.0}, "--timeout"),
        ({"turns": 0}, "--turns"),
        ({"id_range": (5, 5)}, "--id-range"),
        ({"url": "localhost:8000"}, "--url"),
        ({"prompt_format": "ids", "endpoint": "chat"}, "chat takes text"),
        ({"prompt_format": "ids", "workload": "multi-turn"}, "multi-turn"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        BenchConfig(**fields)
