"""Where the environment decides."""

from __future__ import annotations

import os
from pathlib import Path

from core import env


def test_the_cache_folder_in_order_of_preference(monkeypatch):
    monkeypatch.delenv("ANTIPHON_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.cache_dir() == Path.home() / ".cache" / "antiphon"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert env.cache_dir() == Path("/x/antiphon")
    monkeypatch.setenv("ANTIPHON_CACHE", "/mine")
    assert env.cache_dir() == Path("/mine")


def test_a_default_is_set_but_never_overrides_the_operator(monkeypatch):
    monkeypatch.setenv("THEIR_SETTING", "theirs")
    monkeypatch.setenv("OUR_SETTING", "")  # so that it is put back
    monkeypatch.delenv("OUR_SETTING")
    env.set_default("THEIR_SETTING", "ours")
    env.set_default("OUR_SETTING", "ours")
    assert os.environ["THEIR_SETTING"] == "theirs"  # noqa: TID251 - what the test is about
    assert os.environ["OUR_SETTING"] == "ours"  # noqa: TID251 - what the test is about
