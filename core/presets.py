"""Read a preset, apply dotted overrides (``decode.replicas=2``), return a ClusterConfig."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from core import config
from core.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML with the booleans of version 1.2: ``off``, ``on``, ``no`` and ``yes`` are words."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name is the base's
        first: [(tag, found) for tag, found in listed if tag != "tag:yaml.org,2002:bool"]
        for first, listed in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def names() -> tuple[str, ...]:
    """The presets that ship with the package."""
    folder = resources.files("core") / "preset_files"
    return tuple(
        sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
    )


def read(preset: str, overrides: tuple[str, ...] = ()) -> config.ClusterConfig:
    """A shipped preset by name, or a YAML file by path, with overrides applied."""
    tree = _parse(_text(preset), preset)
    for override in overrides:
        _apply(tree, override)
    return config.load(tree)


def _text(preset: str) -> str:
    if preset in names():
        return (resources.files("core") / "preset_files" / f"{preset}.yaml").read_text("utf-8")
    path = Path(preset)
    if path.suffix in {".yaml", ".yml"} and path.is_file():
        return path.read_text("utf-8")
    raise ConfigError(
        f"no preset {preset!r}: choose one of {', '.join(names())}, or give the path of a YAML file"
    )


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        tree = _plain(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} must be a mapping at the top level")
    return tree


def _plain(text: str) -> Any:  # opaque: parsed YAML
    """What yaml.safe_load gives, by our loader."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one ``path=value``; the value is YAML: ``8``, ``true``, ``null`` mean themselves."""
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise ConfigError(
            f"override {override!r} must look like path=value, e.g. decode.replicas=2"
        )
    *parents, leaf = path.split(".")
    node = tree
    for key in parents:
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {path!r}: {key} is a value, not a section")
        node = child
    try:
        node[leaf] = _plain(value)
    except yaml.YAMLError:
        raise ConfigError(f"override {path!r}: the value is not valid YAML") from None
