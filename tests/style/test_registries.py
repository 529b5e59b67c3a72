"""Every registry line leads to something that exists."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest

from core.registry import Registry
from tests.support import source


def registries() -> list[tuple[str, str]]:
    """(module, name) of every module-level Registry, found without importing anything."""
    found = []
    for path in source.modules():
        for node in ast.parse(path.read_text("utf-8")).body:
            target = (
                node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            )
            value = getattr(node, "value", None)
            called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            if called.startswith("Registry") and isinstance(target, ast.Name):
                module = source.name(path).removesuffix(".py").replace("/", ".")
                found.append((module, target.id))
    return found


REGISTRIES = registries()


@pytest.mark.parametrize(("module", "name"), REGISTRIES, ids=lambda value: value)
def test_every_usable_entry_can_be_loaded(module, name):
    registry = getattr(import_module(module), name)
    assert isinstance(registry, Registry)
    assert registry.usable(), "nothing of it is installed here"
    for entry in registry.usable():
        assert callable(registry.load(entry)), entry


def test_the_checks_look_at_something():
    assert len(REGISTRIES) >= 3
