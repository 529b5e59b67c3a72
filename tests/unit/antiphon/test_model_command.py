"""``antiphon model``: what it prints, and where."""

from __future__ import annotations

import pytest

from antiphon import cli, model_command
from cluster import model_store, tiny_model


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run a command with empty caches: (exit code, stdout, stderr)."""
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(["model", *words])
        return code, *capsys.readouterr()

    return call


def test_fetch_prints_the_folder_alone(run):
    code, out, _ = run("fetch", "tiny-moe")
    assert (code, out.strip()) == (0, str(model_store.find("tiny-moe")))


def test_fetch_takes_the_default_model_and_notes_progress_on_stderr(run, monkeypatch):
    def resolve(source, progress):
        progress("downloading")
        return source

    monkeypatch.setattr(model_store, "resolve", resolve)
    assert run("fetch") == (0, f"{model_store.DEFAULT}\n", "downloading\n")


def test_list(run):
    code, out, _ = run("list")
    header, smol, moe = out.splitlines()
    assert code == 0
    assert header.split() == list(model_command.COLUMNS)
    assert smol.split() == ["smollm2-135m", "-", "-", "-", "-", "not", "fetched"]
    assert moe.split()[:2] == ["tiny-moe", "DeepseekV3ForCausalLM"]
    assert moe.endswith("4096     ready")


def test_make_tiny_and_show_it(run, tmp_path):
    folder = str(tmp_path / "mine")
    code, out, _ = run("make-tiny", folder, "--architecture", "qwen3_moe", "--seed", "7")
    assert (code, out) == (0, f"antiphon serve --model {folder}\n")
    code, out, _ = run("show", folder)
    facts = dict(line.split("  ", 1) for line in out.splitlines())
    assert facts["architecture"].strip() == "Qwen3MoeForCausalLM"
    assert facts["attention"].strip() == "grouped-query, 4 heads over 2, of 16 numbers"
    assert facts["experts"].strip() == "2 of 8 a token and 0 shared, in 4 of 4 layers"
    assert facts["KV cache"].strip() == "512 B a token in bfloat16, 1.0 KiB in float32"
    assert facts["weights"].strip().endswith("KiB in BF16")


def test_show_does_not_download(run):
    code, out, err = run("show", "owner/model")
    assert (code, out) == (cli.OPERATOR_ERROR, "")
    assert "antiphon model fetch owner/model" in err


def test_help_names_every_architecture(capsys):
    with pytest.raises(SystemExit):
        cli.main(["model", "make-tiny", "--help"])
    assert set(tiny_model.TEMPLATES) <= set(capsys.readouterr().out.replace(",", " ").split())


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (134_515_008, "135 M"), (8_030_261_248, "8.03 B")]
)
def test_counts(number, text):
    assert model_command.count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(512, "512 B"), (2048, "2.0 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5120.0 GiB")],
)
def test_sizes(number, text):
    assert model_command.size(number) == text
