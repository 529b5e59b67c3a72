"""How commands reach a router: key, certificate, and whose fault it is when they cannot."""

from __future__ import annotations

import httpx
import pytest

from antiphon import cli
from antiphon.remote import Remote
from core.errors import ConfigError


@pytest.fixture
def router(monkeypatch):
    """Takes every request; the answer is a refusal, so that the command ends."""
    seen = []

    def request(method, url, **given):
        seen.append((method, url, given))
        body = {"error": {"message": "as the router says"}}
        code = 403 if given["headers"] else 401
        return httpx.Response(code, json=body, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx, "request", request)
    monkeypatch.delenv("ANTIPHON_KEY", raising=False)
    return seen


COMMANDS = [
    (["status"], "GET", "/status", None),
    (["dump"], "GET", "/admin/dump", None),
    (["scale", "decode=2"], "POST", "/admin/scale", {"replicas": {"decode": 2}}),
    (["drain", "decode/0"], "POST", "/admin/drain", {"rank": "decode/0"}),
]


@pytest.mark.parametrize(("words", "method", "path", "body"), COMMANDS)
def test_every_command_shows_the_key(words, method, path, body, router, monkeypatch, capsys):
    monkeypatch.setenv("ANTIPHON_KEY", "from-env")
    for more, key in (([], "from-env"), (["--key", "given"], "given")):
        assert cli.main([*words, "--url", "http://there:1", *more]) == cli.OPERATOR_ERROR
        assert capsys.readouterr().err == "antiphon: as the router says\n"
        asked, url, given = router.pop()
        assert (asked, url, given["json"]) == (method, f"http://there:1{path}", body)
        assert given["headers"] == {"Authorization": f"Bearer {key}"}


def test_without_a_key_the_refusal_names_where_to_give_it(router, capsys):
    assert cli.main(["status"]) == cli.OPERATOR_ERROR
    assert "--key KEY, or the variable ANTIPHON_KEY" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["foo", "foo:8000", "ftp://foo", "https://", "http://[::1"])
@pytest.mark.parametrize("words", [["status", "--url"], ["bench", "--url"]])
def test_what_is_no_address_is_named(words, url, capsys):
    assert cli.main([*words, url]) == cli.OPERATOR_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "--url" in line
    assert "Invalid port" in line or "begins with http:// or https://" in line


@pytest.mark.parametrize(
    ("text", "words"), [(None, "--ca: cannot read"), ("x", "no certificate in PEM form")]
)
def test_a_certificate_that_is_none(text, words, tmp_path):
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        Remote("https://there:1", ca=str(path)).ask("/status")
