"""Registry: import when chosen, and errors that name the fix."""

from __future__ import annotations

import sys
from fractions import Fraction

import pytest

from core.errors import BackendUnavailable, UnknownBackend
from core.registry import Entry, Registry

KINDS = Registry[object](
    "number",
    {
        "rare": Entry("colorsys:rgb_to_hsv", needs=("no_such_package_at_all",)),
        "exact": Entry("fractions:Fraction"),
        "lazy": Entry("this_module_does_not_exist:Nothing"),
    },
    order=("rare", "exact"),
)


def nothing_missing():
    return ()


def no_compiler():
    return ("a compiler",)


def test_a_check_says_what_else_is_missing():
    registry = Registry[object](
        "number",
        {
            "built": Entry("fractions:Fraction", check=f"{__name__}:no_compiler"),
            "ready": Entry("fractions:Fraction", check=f"{__name__}:nothing_missing"),
            "lib": Entry("a:b", needs=("absent_x",), check="never_imported:check"),
        },
        order=("lib", "built", "ready"),
    )
    assert registry.usable() == ("ready",)
    assert registry.resolve("auto") == "ready"
    with pytest.raises(BackendUnavailable, match="needs a compiler: install it"):
        registry.load("built")


def test_load_returns_the_named_attribute():
    assert KINDS.load("exact") is Fraction


def test_auto_takes_the_first_usable_of_the_order():
    assert KINDS.load("auto") is Fraction


def test_only_the_chosen_module_is_imported():
    KINDS.load("exact")
    assert "this_module_does_not_exist" not in sys.modules
    assert KINDS.usable() == ("exact", "lazy")
    assert tuple(KINDS) == ("rare", "exact", "lazy")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownBackend, match="unknown number 'exakt': choose one of exact, lazy"):
        KINDS.load("exakt")


def test_a_missing_library_is_named():
    with pytest.raises(BackendUnavailable, match="needs no_such_package_at_all"):
        KINDS.load("rare")


def test_auto_without_anything_usable_says_what_is_missing():
    registry = Registry[object](
        "number", {"rare": Entry("a:b", needs=("absent_x",))}, order=("rare",)
    )
    with pytest.raises(BackendUnavailable, match="absent_x"):
        registry.load("auto")
