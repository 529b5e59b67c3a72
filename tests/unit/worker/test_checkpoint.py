"""Which files hold the weights: one rule for the check, the loader and the revision."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from core.errors import ModelError
from worker.checkpoint import read_header, weight_bytes, weight_files


def save(folder, *names):
    for name in names:
        save_file({"a": np.zeros((2, 3), np.float32)}, folder / name, metadata={"format": "pt"})


def index(folder, **weight_map):
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_without_an_index_it_is_one_file(tmp_path):
    save(tmp_path, "model.safetensors", "adapter.safetensors")
    assert weight_files(tmp_path) == (tmp_path / "model.safetensors",)
    assert weight_bytes(tmp_path) == (tmp_path / "model.safetensors").stat().st_size


def test_an_index_decides_and_the_order_is_by_name(tmp_path):
    save(tmp_path, "model.safetensors", "b.safetensors", "a.safetensors")
    index(tmp_path, x="b.safetensors", y="a.safetensors", z="b.safetensors")
    assert [file.name for file in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_files_that_nothing_names_are_no_weights(tmp_path):
    save(tmp_path, "other.safetensors")
    with pytest.raises(ModelError, match=r"missing: model\.safetensors \(there is no .*index"):
        weight_files(tmp_path)


def test_a_file_that_the_index_names_is_missing(tmp_path):
    save(tmp_path, "a.safetensors", "model.safetensors")
    index(tmp_path, x="a.safetensors", y="b.safetensors")
    with pytest.raises(ModelError, match=r"missing: b\.safetensors \(the index names them"):
        weight_files(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": [1]}'])
def test_a_broken_index(tmp_path, text):
    save(tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="is not a safetensors index"):
        weight_files(tmp_path)


def test_a_header_is_read_without_its_data(tmp_path):
    save(tmp_path, "model.safetensors")
    [(name, tensor)] = read_header(tmp_path / "model.safetensors").items()
    assert (name, tensor.dtype, tensor.shape) == ("a", "F32", (2, 3))
    assert (tensor.numbers, tensor.size) == (6, 24)
