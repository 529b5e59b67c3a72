"""What models are here, and what they say of themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import model_catalog, model_store, tiny_model
from core.errors import ModelError
from tests.support.hub import serve_hub


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "v3"
    tiny_model.make(folder, "deepseek_v3")
    return folder


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Two models of the hub, one of them of an architecture that is not served."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def fetch(folder, name, **changes):
    """Put the model of ``folder`` into the hub's cache, its config changed."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | changes).encode()
    with serve_hub({name: files}) as (endpoint, _):
        return model_store.resolve(name, lambda _: None, endpoint=endpoint)


def test_facts_come_from_the_headers(tiny):
    facts = model_catalog.facts(tiny)
    assert (facts.spec.architecture, facts.folder) == ("DeepseekV3ForCausalLM", tiny)
    assert facts.weight_bytes == {"BF16": 2 * facts.parameters}
    assert facts.weight_bytes["BF16"] < (tiny / "model.safetensors").stat().st_size


def test_the_shipped_model_keeps_its_bias_in_fp32_and_counts_no_copy():
    """Its layer of multi-token prediction has the embedding and the head a second time."""
    facts = model_catalog.facts(model_store.resolve("tiny-moe", lambda _: None))
    assert list(facts.weight_bytes) == ["BF16", "F32"]
    stored = facts.weight_bytes["BF16"] // 2 + facts.weight_bytes["F32"] // 4
    assert stored - facts.parameters == 2 * facts.spec.vocab * facts.spec.hidden


def test_the_readme_says_how_large_the_shipped_model_is():
    facts = model_catalog.facts(model_store.resolve("tiny-moe", lambda _: None))
    readme = (Path(__file__).parents[3] / "README.md").read_text("utf-8")
    assert f"a trained {facts.parameters / 1e6:.1f}M model" in readme


def test_built_in_models_are_listed_whether_fetched_or_not(tmp_path):
    listed = model_catalog.catalogue(tmp_path, tmp_path / "none")
    assert [(e.source, e.folder is None) for e in listed] == [
        ("smollm2-135m", True),
        ("tiny-moe", False),
    ]
    assert listed[1].facts is not None


def test_models_of_the_hub_are_listed_by_name(tiny, tmp_path, hub_cache):
    folder = fetch(tiny, "owner/b")
    fetch(tiny, "owner/a", quantization_config={"quant_method": "fp8"})
    a, b = model_catalog.catalogue(tmp_path)[2:]
    assert (a.source, b.source, b.folder) == ("owner/a", "owner/b", folder)
    assert a.facts is None
    assert "quant_method is 'fp8'" in a.problem
    assert b.facts is not None
    assert b.facts.spec.context_len == 2048


def test_a_model_is_found_without_network(tiny, tmp_path, hub_cache):
    assert model_store.find("owner/b") is None
    folder = fetch(tiny, "owner/b")
    assert model_store.find("owner/b") == folder
    assert model_store.find(str(tiny)) == tiny
    assert model_store.find("smollm2-135m", cache=tmp_path) is None
    assert model_store.find("no such thing") is None


def test_a_folder_that_cannot_be_served_says_why(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        model_catalog.facts(tmp_path)
