"""A name that no registry knows is refused when the configuration is read."""

from __future__ import annotations

import pytest

from antiphon import cli
from cluster import names
from core import presets
from core.errors import ConfigError
from core.registry import Entry, Registry

CASES = [
    ("cpu", "prefill.attention", "attention backend", "auto, cpu, torch"),
    ("cpu", "decode.attention", "attention backend", "auto, cpu, torch"),
    ("cpu-unified", "unified.attention", "attention backend", "auto, cpu, torch"),
    ("cpu", "router.policy", "routing policy", "cache_aware, least_load, round_robin"),
    ("cpu", "router.tokenizer", "tokenizer", "hf, bytes"),
]
# what the tree itself knows: no registry is asked
LITERALS = ["disagg.transport", "disagg.protocol", "prefill.schedule", "model.dtype",
            "cluster.runtime"]  # fmt: skip


@pytest.mark.parametrize(("preset", "path", "kind", "known"), CASES)
def test_an_unknown_name_is_refused_with_its_path_and_the_known_ones(preset, path, kind, known):
    with pytest.raises(ConfigError) as refused:
        names.check(presets.read(preset, (f"{path}=bogus",)))
    assert str(refused.value).startswith(f"$.{path}: unknown {kind} 'bogus': choose one of ")
    assert set(known.split(", ")) <= set(str(refused.value).partition("one of ")[2].split(", "))


@pytest.mark.parametrize("preset", presets.names())
def test_every_preset_names_what_there_is(preset):
    names.check(presets.read(preset))


@pytest.mark.parametrize("command", ["serve", "check", "plan"])
@pytest.mark.parametrize("path", [case[1] for case in CASES if case[0] == "cpu"] + LITERALS)
def test_every_command_refuses_it_before_anything_starts(command, path, capsys):
    """Not even the model is looked for: there is none of this name."""
    words = (command, "cpu", "--model", "nobody/nothing", f"{path}=bogus")
    assert cli.main(words) == cli.OPERATOR_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert path in line
    assert "bogus" in line


def test_the_words_of_a_registry():
    entries = {"a": Entry("x:y", needs=("no_such_module",)), "b": Entry("x:z")}
    assert Registry("thing", entries).words == ("a", "b")
    assert Registry("thing", entries, order=("b", "a")).words == ("auto", "a", "b")
