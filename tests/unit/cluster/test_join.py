"""A router that joins: what it says when it cannot listen."""

from __future__ import annotations

import asyncio
import socket

import pytest

from antiphon import cli
from cluster import join, preflight
from core import log, presets
from core.config import ModelConfig
from core.errors import PreflightError
from tests.support.source import ROOT

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def log_of_pytest(monkeypatch):
    """The command line would write the log to stderr, which is closed when the test ends."""
    monkeypatch.setattr(log, "setup", lambda *_, **__: None)


@pytest.mark.parametrize("key", ["router.port", "router.grpc_port"])
def test_a_port_in_use_is_one_line_that_names_its_key(key, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["router.port=0", "router.grpc_port=0", f"{key}={port}"]
        assert cli.main(["router", "--join", NOBODY, *words]) == cli.OPERATOR_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port {port} is in use" in line
    assert f"{key}=" in line


def test_a_port_taken_since_is_no_traceback_either(monkeypatch):
    async def ask(_):
        model = ModelConfig(source=str(ROOT / "models" / "tiny-moe"))
        return join.Announced(model=model, context_len=64, members=())

    monkeypatch.setattr(join, "_ask", ask)
    monkeypatch.setattr(preflight, "port_problems", lambda _: [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = (f"router.port={taken.getsockname()[1]}", "router.grpc_port=0")
        config = presets.read("cpu", words)
        with pytest.raises(PreflightError, match=r"cannot listen on .* router\.port="):
            asyncio.run(join.join(config, NOBODY, lambda _: None))
