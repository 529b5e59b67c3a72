"""Secrets stay where they are, and no error shows one."""

from __future__ import annotations

import pytest

from core import config, presets, secret
from core.errors import ConfigError

KEY = "router.admin_key"


def test_a_secret_is_itself_or_in_the_environment_or_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEYS", "one two")
    (tmp_path / "keys").write_text("three\nfour\n")
    assert secret.read("plain", KEY) == ("plain",)
    assert secret.read("env:MY_KEYS", KEY) == ("one", "two")
    assert secret.read(f"file:{tmp_path}/keys", KEY) == ("three", "four")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("env:NOT_SET_ANYWHERE", "the environment has no NOT_SET_ANYWHERE"),
        ("env:EMPTY", "env:EMPTY is empty"),
        ("file:/no/such/file", "cannot read /no/such/file: No such file"),
        ("kéy-of-mine", "printable ASCII"),
        (" ", "is empty"),
    ],
)
def test_what_is_wrong_is_said_with_the_key_and_without_the_secret(reference, words, monkeypatch):
    monkeypatch.setenv("EMPTY", " \n")
    with pytest.raises(ConfigError, match=f"^{KEY}: .*{words}") as caught:
        secret.read(reference, KEY)
    assert "of-mine" not in str(caught.value)


def test_a_configuration_in_a_log_shows_no_key():
    tree = config.load(
        {"unified": {}, "router": {"api_keys": ["hush-1"], "admin_key": "hush-2", "port": 81}}
    )
    assert "hush" not in repr(tree)
    assert "port=81" in repr(tree)


def test_an_override_that_is_no_yaml_is_not_shown():
    with pytest.raises(ConfigError, match=r"router\.api_keys") as caught:
        presets.read("cpu", ("router.api_keys=[hush",))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("router", "words"),
    [
        ({"api_keys": [""]}, "empty key"),
        ({"salt_by_key": True}, "salt_by_key needs api_keys"),
        ({"tls_cert": "a"}, "go together"),
        ({"tls_key": "a"}, "go together"),
        ({"tls_client_ca": "a"}, "needs tls_cert"),
        ({"max_output_tokens": 15}, "at least 16"),
        ({"max_choices": 0}, "at least 1"),
        ({"request_timeout_s": -1}, "request_timeout_s"),
    ],
)
def test_the_rules_of_the_router(router, words):
    with pytest.raises(ConfigError, match=words):
        config.load({"unified": {}, "router": router})
