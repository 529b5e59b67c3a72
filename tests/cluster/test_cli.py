"""What ``antiphon serve`` says when it cannot start, and that it leaves nothing when it ends."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess

import pytest

from core.clock import RealClock
from tests.support.served import ANTIPHON, ANY_PORTS, started
from tests.support.source import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # Ray's own; they look once a minute
MOE = ("--model", str(ROOT / "models" / "tiny-moe"))


def refused(*words):
    """The one line that names the fix."""
    started_s = RealClock().now()
    done = subprocess.run(
        [ANTIPHON, "serve", *ANY_PORTS, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert RealClock().now() - started_s < 10
    (line,) = done.stderr.splitlines()
    assert line.startswith("antiphon: ")
    return line


def test_a_busy_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        line = refused(*MOE, f"router.port={port}")
    assert f"port {port} is in use (by " in line
    assert "router.port=" in line


def test_a_model_that_is_nowhere():
    line = refused("--model", "/no/such/folder")
    assert "/no/such/folder" in line
    assert "give an existing folder" in line


def test_a_broken_model_folder(tmp_path):
    shutil.copytree(MOE[1], tmp_path / "moe")
    weights = tmp_path / "moe" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "moe" / "tokenizer.json").unlink()
    line = refused("--model", str(tmp_path / "moe"))
    assert "tokenizer.json is missing" in line
    assert "copy it again" in line


def test_an_unknown_preset():
    assert "cpu-unified" in refused("gpu-cluster")


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("decode.replica=2", "$.decode"),
        ("decode.replicas=many", "$.decode.replicas"),
        ("model.context_len=999999", "$.model.context_len"),
        ("decode.kv_memory_mib=99999999", "kv_memory_mib"),
    ],
)
def test_an_override_that_means_nothing(override, path):
    assert path in refused(*MOE, override)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ranks_start_leaves_nothing(number):
    with started(*MOE) as served:
        served.wait_for("starting on Ray")
        code = served.stop(number)
        assert code == 130, served.log
        assert "Traceback" not in served.log


def test_sigterm_ends_a_start_where_interrupts_are_ignored():
    with started(*MOE, interrupts=False) as served:
        served.wait_for("starting on Ray")
        assert served.stop(signal.SIGTERM) == 130, served.log


def test_a_terminated_server_stops_in_order():
    with started("cpu", *MOE, "cluster.runtime=local") as served:
        served.wait_ready()
        assert served.stop(signal.SIGTERM) == 0, served.log
        assert served.lines[-1] == "stopped\n"


def test_a_killed_driver_leaves_no_worker():
    with started("cpu", *MOE) as served:
        served.wait_ready()
        pids = [served.rank(role)["info"]["pid"] for role in ("prefill", "decode")]
        running = {int(line.split()[0]) for line in served.processes()}
        assert {*pids, served.process.pid} <= running, "the session does not hold the workers"
        served.process.kill()
        served.process.wait()
        served.gone(lambda: [line for line in served.processes() if not line.endswith(AGENTS)])
