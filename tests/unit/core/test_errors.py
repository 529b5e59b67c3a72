"""The error tree: its drawing is its truth, and each branch can be caught as one."""

from __future__ import annotations

import inspect
import re

import pytest

from core import errors

CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.AntiphonError)
}


def test_the_drawing_names_every_class():
    assert errors.__doc__ is not None
    drawn = re.findall(r"^[│├└─ ]*([A-Z]\w+)", errors.__doc__.split("\n\n", 1)[1], re.MULTILINE)
    assert set(drawn) == set(CLASSES)


@pytest.mark.parametrize(
    "name", ["ConfigError", "UnknownBackend", "BackendUnavailable", "ModelError", "PreflightError"]
)
def test_what_the_operator_can_mend_is_an_operator_error(name):
    assert issubclass(CLASSES[name], errors.OperatorError)


def test_messages_name_the_fix():
    assert "install it" in str(errors.BackendUnavailable("tokenizer", "hf", ("tokenizers",)))
    assert "a, b" in str(errors.UnknownBackend("policy", "c", ("b", "a")))


def test_facts_that_clients_are_told():
    assert errors.RequestError("no", param="top_p").param == "top_p"
    assert errors.Overloaded("later", retry_after_s=2.5).retry_after_s == 2.5
