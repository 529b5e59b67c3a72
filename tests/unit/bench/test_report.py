"""Tables, JSON lines, the progress bar and the plot."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from bench import plot, report
from bench.config import BenchConfig, Targets
from bench.outcome import Outcome
from bench.progress import Progress
from bench.stats import summarise
from core.clock import VirtualClock
from core.errors import ConfigError, PreflightError

OUTCOMES = [
    Outcome(
        session=i,
        turn=0,
        due_s=float(i),
        start_s=float(i),
        end_s=i + 2.0,
        chunk_s=(i + 0.5, i + 1.0, i + 1.5),
        prompt_tokens=10,
        completion_tokens=6,
        cached_tokens=4,
        finish="length",
    )
    for i in range(4)
]
FAILED = Outcome(session=9, turn=0, due_s=0.0, start_s=0.5, end_s=0.6, error="HTTP 429: busy")


def made(outcomes, *, cpu=0.1, planned=0, interrupted=False, **fields):
    config = BenchConfig(**fields)
    result = summarise(outcomes, config.targets)
    return report.make(
        config,
        result,
        model="m",
        epoch_s=0.0,
        client_cpu_share=cpu,
        planned=planned or len(outcomes),
        interrupted=interrupted,
    )


def test_the_json_line_keeps_its_keys():
    line = report.json_line(made(OUTCOMES, targets=Targets(ttft_ms=600)))
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    data = json.loads(line)
    assert list(data) == [
        "schema", "time", "model", "planned", "interrupted", "client_cpu_share", "versions",
        "machine", "config", "result",
    ]  # fmt: skip
    assert data["schema"] == 1
    assert data["time"] == "1970-01-01T00:00:00+00:00"
    assert {"python", "antiphon", "httpx"} == set(data["versions"])
    assert set(data["machine"]) == {"system", "cpus", "memory_gib"}
    assert list(data["result"]) == [
        "requests", "ok", "failed", "errors", "duration_s", "requests_per_s", "in_flight",
        "prompt_tokens", "cached_share", "output_tokens", "output_tokens_from",
        "output_tokens_per_s", "total_tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms",
        "goodput", "late_p99_ms",
    ]  # fmt: skip
    assert data["result"]["ttft_ms"] == {"mean": 500, "p50": 500, "p90": 500, "p99": 500}
    assert data["result"]["goodput"] == {"requests": 4, "share": 1.0, "per_s": 0.8}
    assert data["config"]["workload"] == "random"
    assert data["config"]["targets"]["ttft_ms"] == 600


def test_the_table_says_it_all():
    text = report.table(made([*OUTCOMES, FAILED], targets=Targets(ttft_ms=600)))
    lines = text.splitlines()
    assert lines[0] == "m on http://127.0.0.1:8000"
    assert lines[3].split() == ["TTFT", "ms", "500.0", "500.0", "500.0", "500.0"]
    assert lines[4].split() == ["TPOT", "ms", "200.0", "200.0", "200.0", "200.0"]
    assert "4 ok, 1 failed in 5.0 s: 0.80/s, 1.6 in flight on average" in text
    assert "40, 40.0% cached" in text
    assert "24: 4.8/s" in text
    assert "80.0% of the requests met the targets: 0.80/s" in text
    assert "1 x HTTP 429: busy" in text
    assert "sent late: up to 480 ms" in text  # p99 of four on time and one 500 ms late
    assert "load generator used" not in text


def test_the_table_of_nothing_and_of_a_busy_load_generator():
    text = report.table(made([FAILED], cpu=0.93))
    assert text.splitlines()[3].split() == ["TTFT", "ms", "-", "-", "-", "-"]
    assert "sends no usage" not in text
    assert "the load generator used 93% of its core" in text


def test_the_table_says_what_a_server_without_usage_leaves_open():
    bare = Outcome(session=0, turn=0, due_s=0.0, start_s=0.0, end_s=1.0, chunk_s=(0.5,))
    text = report.table(made([bare]))
    assert "unknown: the server sends no usage" in text
    assert "1 (chunks: the server sends no usage): 1.0/s" in text


def test_a_line_for_each_request():
    lines = [json.loads(line) for line in report.request_lines([*OUTCOMES, FAILED])]
    assert [line["error"] for line in lines] == ["HTTP 429: busy", None, None, None, None]
    assert lines[2]["start_s"] == 1
    assert lines[2]["chunk_s"] == [1.5, 2.0, 2.5]
    assert (lines[0]["ttft_s"], lines[1]["ttft_s"]) == (None, 0.5)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_fills_and_is_not_drawn_too_often():
    clock, stream = VirtualClock(), Terminal()
    bar = Progress(100, stream, clock)
    for i in range(100):
        clock.advance(0.01)
        bar.advance(failed=i == 3)
    bar.close()
    drawn = stream.getvalue().split("\r")[1:]
    assert 8 <= len(drawn) <= 13
    assert drawn[-1].startswith(f"[{'#' * 30}] 100/100 requests, 1 failed, 1 s")
    assert stream.getvalue().endswith("\n")


def test_without_a_terminal_there_are_ten_lines():
    stream = io.StringIO()
    bar = Progress(40, stream, VirtualClock())
    for _ in range(40):
        bar.advance(failed=False)
    bar.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "4/40 requests, 0 s"
    assert lines[-1] == "40/40 requests, 0 s"


def test_throughput_over_time_adds_up():
    times, tokens, running = plot.series(OUTCOMES)
    assert len(times) == len(tokens) == len(running) == 100
    width = times[1] - times[0]
    assert np.sum(tokens) * width == pytest.approx(24)
    assert (running[0], running[50], max(running)) == (1, 2, 2)
    assert all(len(column) == 0 for column in plot.series([]))


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda _: object())
    plot.require(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="must end in"):
        plot.require(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="there is no folder"):
        plot.require(tmp_path / "none" / "a.png")
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    with pytest.raises(PreflightError, match=r"pip install 'antiphon\[bench\]'"):
        plot.require(Path("a.png"))


@pytest.mark.parametrize("outcomes", [OUTCOMES, [FAILED], [*OUTCOMES, FAILED]])
def test_a_plot_is_drawn(tmp_path, outcomes):
    pytest.importorskip("matplotlib", reason="needs antiphon[bench]")
    path = tmp_path / "a.png"
    plot.draw(made(outcomes, targets=Targets(ttft_ms=600)), outcomes, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_says_so(tmp_path):
    whole = made(OUTCOMES, planned=9, interrupted=True)
    assert "interrupted       after 4 of 9 requests" in report.table(whole)
    assert "interrupted" not in report.table(made(OUTCOMES))
    pytest.importorskip("matplotlib")
    for run, marked in ((whole, True), (made(OUTCOMES), False)):
        plot.draw(run, OUTCOMES, tmp_path / "run.svg")
        drawn = (tmp_path / "run.svg").read_text()  # with the words of each text in a comment
        assert ("interrupted (of 9 planned)" in drawn) == marked
