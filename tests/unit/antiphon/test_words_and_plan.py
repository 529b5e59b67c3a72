from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from antiphon import cli, words
from core.errors import ConfigError

TINY = "tiny-moe"


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_words_come_in_any_order():
    assert words.split(["a.b=1", "cpu-unified", "c=2"]) == ("cpu-unified", ("a.b=1", "c=2"))
    assert words.split([]) == ("cpu", ())
    with pytest.raises(ConfigError, match="one preset"):
        words.split(["cpu", "cpu-unified"])


def test_verbose_lets_router_and_ranks_log_what_happens():
    def level(*argv: str) -> str:
        return words.read(cli._parse(argv)).cluster.log_level

    assert level("serve") == "warning"
    assert level("serve", "-v") == "info"
    assert level("serve", "-v", "cluster.log_level=debug") == "debug"


def test_plan_shows_every_rank_and_reads_no_weights(capsys, tmp_path):
    folder = tmp_path / "big"
    folder.mkdir()
    config = json.loads((words_model() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": 4 * 2**30}, "weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    code, out, _ = run(
        capsys, "plan", "decode.replicas=2", "--model", str(folder), "model.dtype=bfloat16"
    )
    assert code == 0
    for rank in ("prefill/0/0", "decode/0/0", "decode/1/0"):
        assert rank in out
    assert "4.00 GiB" in out
    assert "3 ranks, 15.00 GiB of weights and KV in all" in out


def words_model():
    from cluster import model_store

    folder = model_store.find(TINY)
    assert folder is not None
    return folder


def test_plan_refuses_what_cannot_be(capsys):
    code, _, err = run(capsys, "plan", "--model", TINY, "model.context_len=999999")
    assert code == 2
    assert "$.model.context_len" in err
    code, _, err = run(capsys, "plan", "--model", "nobody/nothing")
    assert code == 2
    assert "antiphon model fetch nobody/nothing" in err


def test_plan_warns_of_what_no_machine_holds(capsys):
    absurd = ("plan", "--model", TINY, "decode.kv_tokens=1000000000000")
    code, out, err = run(capsys, *absurd)
    assert (code, err) == (0, "")
    assert "decode/0/0" in out
    *_, last = out.splitlines()
    assert last.startswith("warning: each decode rank needs about ")
    assert "of 1000000000000 tokens" in last
    assert "this machine has " in last
    assert run(capsys, *absurd, "--strict")[0] == 1
    code, out, _ = run(capsys, "plan", "cpu-unified", "--model", TINY, "--strict")
    assert code == 0
    assert "warning" not in out


def test_check_passes_or_names_every_problem(capsys):
    code, out, _ = run(
        capsys,
        *("check", "cpu-unified", "--model", TINY, "router.port=0", "router.grpc_port=0"),
        "unified.kv_memory_mib=16",
    )
    assert (code, out.splitlines()[-1]) == (0, "all checks passed")
    code, _, err = run(capsys, "check", "--model", TINY, "prefill.kv_memory_mib=99000000")
    assert code == 2
    assert "kv_memory_mib" in err


def test_check_looks_at_shapes_too(capsys, tmp_path):
    folder = tmp_path / "moe"
    shutil.copytree(words_model(), folder)
    ports = ("router.port=0", "router.grpc_port=0")
    code, out, err = run(capsys, "check", "--model", str(folder), *ports)
    assert (code, out, err) == (0, "all checks passed\n", "")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, folder / "model.safetensors")
    code, _, err = run(capsys, "check", "--model", str(folder), *ports)
    assert code == cli.OPERATOR_ERROR
    assert "tensor model.norm.weight has shape" in err
