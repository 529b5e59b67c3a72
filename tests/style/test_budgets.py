"""Small files, small functions, empty package files."""

from __future__ import annotations

import ast

import pytest

from tests.support import source

FILE_LINES = 400
FUNCTION_LINES = 60
MODULES = source.modules()


@pytest.mark.parametrize("path", MODULES, ids=source.name)
def test_a_file_can_be_read_in_one_sitting(path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= FILE_LINES, "split it by job"
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, functions) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name == "__init__.py"], ids=source.name
)
def test_package_files_hold_no_code(path):
    if source.name(path) in {"antiphon/__init__.py", "antiphon/lang/__init__.py"}:
        return  # the public face
    body = ast.parse(path.read_text("utf-8")).body
    assert all(isinstance(node, ast.Expr) for node in body), "import from the module itself"


def test_the_checks_look_at_something():
    assert len(MODULES) > 40
