"""Nothing here turns bytes from elsewhere into code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support import source

# What they read may run anything. Ray pickles on its own sockets, which is Ray's.
UNSAFE = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"}


def unsafe(text: str) -> Iterator[str]:
    """What of it is used, with the line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            names = [f"{ast.unparse(node.func)}()"]
            names += [k.arg for k in node.keywords if k.arg == "allow_pickle"]
        else:
            continue
        for name in names:
            plain = name.removesuffix("()")
            if plain.split(".")[0] in UNSAFE or plain in UNSAFE_CALLS or plain == "allow_pickle":
                yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize("path", source.modules(), ids=source.name)
def test_no_module_unpickles_or_evaluates(path):
    assert list(unsafe(path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from cloudpickle import loads",
        "import os, shelve",
        "from torch import load",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(f)",
        "def f():\n    import marshal",
        "eval('1')",
    ],
)
def test_the_check_sees(text):
    assert list(unsafe(text))


@pytest.mark.parametrize("text", ["model.eval()", "import json", "safetensors.load(f)"])
def test_the_check_lets_pass(text):
    assert not list(unsafe(text))
