"""What the configuration says of tracing reaches the router and every rank."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cluster import preflight
from cluster.plan import Cpu, Plan, resolve_dtype, resolve_paths
from cluster.routing import router
from core import presets
from core.config import RouterConfig, TracingConfig, load
from core.errors import PreflightError
from core.tracing.file import read
from router.text.request import ServedModel
from tests.support.eventually import run_tidy
from tests.support.specs import dense

MODEL = ServedModel(name="tiny", context_len=100, vocab_size=258)


def test_ranks_and_router_write_to_the_same_file_wherever_they_run():
    cpu = Cpu(cores=2, bf16=False)
    tree = {"prefill": {}, "decode": {}, "tracing": {"file": "spans", "sample": 0.5}}
    config = resolve_paths(resolve_dtype(load(tree), cpu), Path("/srv/here"))
    assert config.tracing == TracingConfig(file="/srv/here/spans", sample=0.5)
    ranks = Plan(config, Path("/models/tiny"), dense(), cpu).ranks()
    assert [spec.tracing for spec in ranks] == [config.tracing] * 2
    whole = resolve_paths(load({"unified": {}, "tracing": {"file": "/a/b"}}), Path("/srv/here"))
    assert whole.tracing.file == "/a/b"
    assert resolve_paths(load({"unified": {}}), Path("/srv/here")).tracing == TracingConfig()


def tracing_threads() -> int:
    return sum(thread.name == "tracing" for thread in threading.enumerate())


def test_a_router_traces_while_it_runs(tmp_path: Path):
    settings = RouterConfig(tokenizer="bytes", policy="round_robin", grpc=False)
    path, before = tmp_path / "spans", tracing_threads()

    async def main() -> None:
        async with router(settings, MODEL, tmp_path, TracingConfig(file=str(path))):
            assert tracing_threads() == before + 1
        async with router(settings, MODEL, tmp_path, TracingConfig()):
            assert tracing_threads() == before

    run_tidy(main)
    assert tracing_threads() == before
    assert read(path.read_text()) == []


def test_a_check_finds_what_is_missing_before_anything_starts(tmp_path: Path):
    gone = f"tracing.file={tmp_path}/gone/spans"
    config = presets.read("cpu-unified", ("router.port=0", "router.grpc_port=0", gone))
    assert preflight.tracing.problem(config.tracing) is not None
    with pytest.raises(PreflightError, match="there is no folder"):
        _check(config, tmp_path)


def _check(config, folder: Path) -> None:
    from cluster import gguf_import
    from tests.support import gguf_files

    gguf_files.write_gguf(folder / "tiny.gguf")
    gguf_import.convert(folder / "tiny.gguf", folder)
    preflight.check(config, folder)
