"""Presets and dotted overrides."""

from __future__ import annotations

import pytest

from core import presets
from core.errors import ConfigError


def test_the_shipped_presets_are_complete_configurations():
    assert {"cpu", "cpu-unified"} <= set(presets.names())
    for name in presets.names():
        assert presets.read(name).groups


def test_the_default_is_a_pair_on_ray_with_mooncake():
    cpu = presets.read("cpu")
    assert cpu.prefill is not None
    assert cpu.decode is not None
    assert (cpu.cluster.runtime, cpu.disagg.transport) == ("ray", "mooncake")


def test_overrides_are_yaml_values_and_the_last_one_wins():
    tree = presets.read(
        "cpu",
        ("decode.replicas=2", "decode.replicas=3", "model.served_name=tiny", "router.port=0"),
    )
    assert tree.decode is not None
    assert (tree.decode.replicas, tree.model.served_name, tree.router.port) == (3, "tiny", 0)


def test_off_is_a_word_and_false_is_not():
    words = ("disagg.local_prefill=off", "disagg.checksum=off", "router.grpc=false")
    tree = presets.read("cpu", words)
    assert (tree.disagg.local_prefill, tree.disagg.checksum) == ("off", "off")
    assert tree.router.grpc is False
    assert presets.read("cpu", ("disagg.local_prefill=64",)).disagg.local_prefill == 64


def test_an_override_turns_a_pair_into_one_group():
    tree = presets.read("cpu", ("prefill=null", "decode=null", "unified.replicas=2"))
    assert tree.unified is not None
    assert tree.unified.replicas == 2


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("decode.replicas", "path=value"),
        ("=3", "path=value"),
        ("decode.replicas.x=1", "is a value"),
        ("decode.replicas=[", "not valid YAML"),
        ("decode.replica=2", "replica"),
        ("decode.replicas=many", "$.decode.replicas"),
    ],
)
def test_a_wrong_override_is_refused(override, word):
    base = () if "replicas.x" not in override else ("decode.replicas=1",)
    with pytest.raises(ConfigError) as caught:
        presets.read("cpu", (*base, override))
    assert word in str(caught.value)


def test_a_yaml_file_by_path(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("unified: {threads: 1}\n", "utf-8")
    tree = presets.read(str(file), ("unified.threads=2",))
    assert tree.unified is not None
    assert tree.unified.threads == 2


@pytest.mark.parametrize(
    ("text", "word"), [("- a\n", "mapping"), ("a: [\n", "not valid YAML"), ("", "mapping")]
)
def test_a_file_that_is_no_mapping(tmp_path, text, word):
    file = tmp_path / "broken.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=word):
        presets.read(str(file))


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"cpu-unified.*YAML file"):
        presets.read("gpu-moon")
