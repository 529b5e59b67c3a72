"""Which key opens what, with and without an admin key, here and beyond this machine."""

from __future__ import annotations

import pytest

from core.config import RouterConfig
from core.errors import ConfigError, Forbidden, Unauthorized
from router.keys import Keys, is_loopback, read_keys

A, B, ROOT = "Bearer key-a", "Bearer key-b", "Bearer root"
WRONG = [None, "", "Bearer", "Bearer ", "key-a", "Basic key-a", "Bearer key", "Bearer key-a2"]


def test_without_keys_everybody_may_ask_and_operate():
    for shown in (None, A, "nonsense"):
        assert Keys().caller(shown) == ""
        Keys().operator(shown)


def test_with_keys_only_their_holders_may_ask_and_each_has_a_name():
    keys = Keys(["key-a", "key-b"])
    assert keys.caller(A) == keys.caller("bearer  key-a ") != keys.caller(B) != ""
    assert "key" not in keys.caller(A)
    for shown in WRONG:
        with pytest.raises(Unauthorized) as caught:
            keys.caller(shown)
        assert "key-a" not in str(caught.value)


@pytest.mark.parametrize("keys", [Keys(), Keys([], ["root"]), Keys(["key-a", "key-b"], ["root"])])
def test_whoever_was_let_pass_has_the_same_name_afterwards(keys):
    for shown in (A, B, ROOT):
        assert keys.holder(shown) == keys.caller(shown)
    assert keys.holder(None) == ""


def test_without_an_admin_key_whoever_may_ask_may_operate_on_this_machine_only():
    keys = Keys(["key-a"])
    keys.operator(A)
    with pytest.raises(Unauthorized):
        keys.operator(None)
    for api in ([], ["key-a"]):
        with pytest.raises(Forbidden, match=r"set router\.admin_key"):
            Keys(api, local=False).operator(A)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("api", [[], ["key-a"]])
def test_the_admin_key_opens_everything(api, local):
    keys = Keys(api, ["root", "root-2"], local=local)
    keys.operator(ROOT)
    keys.operator("Bearer root-2")
    keys.caller(ROOT)
    for shown in (None, B):
        with pytest.raises(Unauthorized):
            keys.operator(shown)


def test_an_api_key_is_not_enough_for_operations():
    with pytest.raises(Forbidden, match="admin key"):
        Keys(["key-a"], ["root"]).operator(A)


def test_keys_come_from_the_configuration(monkeypatch):
    monkeypatch.setenv("KEYS", "key-a\nkey-b")
    keys = read_keys(RouterConfig(api_keys=("env:KEYS", "key-c"), admin_key="root", host="::"))
    for shown in (A, B, "Bearer key-c", ROOT):
        assert keys.caller(shown)
    keys.operator(ROOT)
    with pytest.raises(Forbidden, match="beyond"):
        read_keys(RouterConfig(host="0.0.0.0")).operator(None)


def test_what_cannot_be_resolved_names_its_place(monkeypatch):
    with pytest.raises(ConfigError, match=r"^router\.api_keys\[1\]: .*NOT_SET"):
        read_keys(RouterConfig(api_keys=("key", "env:NOT_SET")))
    with pytest.raises(ConfigError, match=r"^router\.admin_key: .*NOT_SET"):
        read_keys(RouterConfig(admin_key="env:NOT_SET"))
    with pytest.raises(ConfigError, match="must be another"):
        read_keys(RouterConfig(api_keys=("same",), admin_key="same"))


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("router.example", False),
        ("", False),
    ],
)
def test_what_only_this_machine_can_connect_to(host, local):
    assert is_loopback(host) is local
