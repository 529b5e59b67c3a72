"""Loading accounts for every tensor, and says which one is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelError, UnknownBackend
from tests.support import tiny_models
from tests.support.steps import Row, advance
from worker.architectures import read_spec
from worker.cache.kv_pool import KVPool
from worker.checkpoint import weight_files
from worker.layers.linear import Linear
from worker.models.weights import check_weights, load_model


@pytest.fixture
def folder(tmp_path):
    tiny_models.make("v3", tmp_path)
    return tmp_path


def load(folder, dtype=torch.float32):
    return load_model(folder, read_spec(folder), dtype)


def change(folder, edit):
    """Rewrite model.safetensors after ``edit(tensors)``."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(folder, model):
    ids = list(range(20))
    pool = KVPool(read_spec(folder), 20, torch.float32)
    return advance(model, pool, [(Row(ids, ids), 20)])[0]


def test_missing_tensors_are_named(folder):
    change(folder, lambda t: [t.pop(k) for k in [*t] if "q_b_proj" in k])
    with pytest.raises(
        ModelError, match=r"3 tensors are missing: model\.layers\.0\.self_attn\.q_b"
    ):
        load(folder)


def test_unexpected_tensors_are_named(folder):
    change(folder, lambda t: t.update({"model.layers.1.extra.weight": torch.ones(1)}))
    with pytest.raises(ModelError, match=r"1 tensors belong to no part .*layers\.1\.extra"):
        load(folder)


def test_a_long_list_of_names_is_cut(folder):
    change(folder, lambda t: t.update({f"x{i}": torch.ones(1) for i in range(9)}))
    with pytest.raises(ModelError, match="x0, x1, x2, x3, x4 and 4 more"):
        load(folder)


def test_shapes_are_compared(folder):
    change(folder, lambda t: t.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[47\].*\[48\]"):
        load(folder)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "has shape"),
        (lambda t: t.update({"model.layers.1.extra.weight": torch.ones(1)}), "belong to no part"),
        (lambda t: t.pop("model.norm.weight"), "are missing"),
    ],
)
def test_headers_alone_show_what_loading_would_refuse(folder, edit, words):
    check_weights(folder, read_spec(folder))
    change(folder, edit)
    with pytest.raises(ModelError, match=words) as checked:
        check_weights(folder, read_spec(folder))
    with pytest.raises(ModelError) as loaded:
        load(folder)
    assert str(checked.value) == str(loaded.value)


def test_a_transposed_matrix_of_the_same_size_is_refused(folder):
    name = "model.layers.0.self_attn.o_proj.weight"
    change(folder, lambda t: t.update({name: t[name][:, :48].reshape(-1, 12).contiguous()}))
    with pytest.raises(ModelError, match=r"o_proj\.weight has shape"):
        load(folder)


def test_quantised_tensors_are_refused(folder):
    change(folder, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.int8; supported"):
        load(folder)


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"weights are missing: model\.safetensors"):
        load(folder)


def test_a_cut_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load(folder)


def test_unknown_attention(folder):
    with pytest.raises(UnknownBackend, match="attention backend 'quick'"):
        load_model(folder, read_spec(folder), torch.float32, attention="quick")


def split(folder, overlap=()):
    """Cut model.safetensors into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    half = len(names) // 2
    parts = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    index = {name: file for file, part in parts.items() for name in part}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in (*part, *overlap)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_an_indexed_checkpoint_is_the_same_model(folder):
    single = logits(folder, load(folder))
    split(folder)
    assert [path.name for path in weight_files(folder)] == ["a.safetensors", "b.safetensors"]
    assert torch.equal(logits(folder, load(folder)), single)


def test_a_file_of_the_index_is_missing(folder):
    split(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"weights are missing: b\.safetensors"):
        load(folder)


def test_a_tensor_in_two_files(folder):
    split(folder, overlap=("model.norm.weight",))
    with pytest.raises(ModelError, match=r"in two files: model\.norm\.weight"):
        load(folder)


def test_a_broken_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        load(folder)


def test_layers_after_the_last_and_rotary_tables_are_skipped(folder):
    single = logits(folder, load(folder))
    surplus = {
        "model.layers.3.eh_proj.weight": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    change(folder, lambda t: t.update(surplus))
    assert torch.equal(logits(folder, load(folder)), single)


def test_a_tied_head_on_disk_is_skipped(tmp_path):
    tiny_models.make("llama-tied-llama3", tmp_path)
    change(tmp_path, lambda t: t.update({"lm_head.weight": torch.full((128, 48), 9.0)}))
    assert logits(tmp_path, load(tmp_path)).abs().max() < 9


@pytest.mark.parametrize("disk", [torch.bfloat16, torch.float16])
def test_other_dtypes_on_disk_are_converted(folder, disk):
    def narrow(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(disk)

    def widen(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.float()

    change(folder, narrow)
    converted = logits(folder, load(folder))
    change(folder, widen)
    assert torch.equal(converted, logits(folder, load(folder)))


def test_packing_frees_the_dense_weights(folder, monkeypatch):
    """Memory peaks at one copy only if no view outlives the filling of a weight."""
    holders = []
    pack = Linear.pack

    def counted(linear):
        storage = linear._weight.untyped_storage()
        holders.append(torch._C._storage_Use_Count(storage._cdata))
        pack(linear)

    monkeypatch.setattr(Linear, "pack", counted)
    load(folder)
    assert set(holders) == {2}  # the weight and the storage object looked at here
