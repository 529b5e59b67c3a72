"""Keys over HTTP: which routes want one, and what is answered without."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import openai
import pytest

from router.admin import Operations, add_operations
from router.keys import Keys
from router.openai.app import make_app
from tests.support.doors import http_client, make_door, services
from tests.support.eventually import run_tidy
from tests.support.fake_streams import FakeStreams, says
from tests.support.http_calls import CHAT, TEXT, call, error_of

KEYS = Keys(["key-a", "key-b"], ["root"])
ALONE = Keys(["key-a"], local=False)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(method: str, path: str, keys: Keys = KEYS, **request: Any) -> httpx.Response:
    return call(lambda client: client.request(method, path, **request), keys=keys)


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
def test_probes_and_scrapers_need_no_key(path):
    assert ask("GET", path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/owner/tiny"),
        ("GET", "/status"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
        ("GET", "//health"),
        ("GET", "/health/"),
    ],
)
@pytest.mark.parametrize("headers", [{}, bearer("key-c"), {"Authorization": "Basic key-a"}])
def test_everything_else_is_401_in_openais_envelope(method, path, headers):
    response = ask(method, path, headers=headers)
    error = error_of(response, 401)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert "key-" not in response.text


@pytest.mark.parametrize("key", ["key-a", "key-b", "root"])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/status", None)])
def test_every_key_opens_what_is_not_an_operation(key, path, body):
    method = "GET" if body is None else "POST"
    assert ask(method, path, headers=bearer(key), json=body).status_code == 200


def test_the_body_of_a_stranger_is_not_read():
    async def endless() -> Any:
        yield b"{"
        raise AssertionError("it was read")

    assert ask("POST", "/v1/completions", content=endless()).status_code == 401


def test_the_openai_client_knows_what_it_means():
    async def main() -> None:
        wiring = services(make_door(FakeStreams(says("ok"))), keys=KEYS)
        async with http_client(wiring) as http:
            for key in ("key-a", "other"):
                client = openai.AsyncOpenAI(
                    base_url="http://test/v1", api_key=key, http_client=http, max_retries=0
                )
                if key == "key-a":
                    await client.models.list()
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()

    run_tidy(main)


# --- operations ---------------------------------------------------------------------------------


def operate(keys: Keys, headers: dict[str, str], **body: Any) -> httpx.Response:
    """POST /admin/scale."""
    asked: list[dict[str, int]] = []

    def scale(replicas: Any) -> dict[str, int]:
        asked.append(dict(replicas))
        return dict(replicas)

    results = []

    async def main() -> None:
        app = make_app(services(make_door(FakeStreams(says("ok"))), keys=keys))
        add_operations(app, Operations(scale=scale, drain=asked.append, members=dict))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as client:
            given = body or {"json": {"replicas": {"decode": 2}}}
            results.append(await client.post("/admin/scale", headers=headers, **given))

    run_tidy(main)
    assert bool(asked) == results[0].is_success
    return results[0]


def test_operations_take_the_admin_key():
    assert operate(KEYS, bearer("root")).json() == {"replicas": {"decode": 2}}
    assert error_of(operate(KEYS, {}), 401)["code"] == "invalid_api_key"
    error = error_of(operate(KEYS, bearer("key-a")), 403)
    assert (error["type"], error["code"]) == ("permission_error", "forbidden")


def test_operations_are_closed_beyond_this_machine_without_an_admin_key():
    for keys in (ALONE, Keys(local=False)):
        message = error_of(operate(keys, bearer("key-a")), 403)["message"]
        assert "router.admin_key" in message
    assert operate(Keys(), {}).is_success


def test_a_web_page_cannot_operate_by_a_plain_form():
    body = msgspec.json.encode({"replicas": {"decode": 2}})
    for headers in ({}, {"Content-Type": "text/plain"}):
        error = error_of(operate(Keys(), headers, content=body), 400)
        assert "application/json" in error["message"]
    kind = {"Content-Type": "application/json; charset=utf-8"}
    assert operate(Keys(), kind, content=body).is_success


# --- tenants ------------------------------------------------------------------------------------


def salts(*requests: tuple[str, dict[str, Any]], **terms: Any) -> list[str]:
    """The salt behind each request, sent with its key."""
    streams = FakeStreams(says("ok"))

    async def main() -> None:
        async with http_client(services(make_door(streams, **terms), keys=KEYS)) as client:
            for key, extra in requests:
                for path, body in (("completions", TEXT), ("chat/completions", CHAT)):
                    answer = await client.post(
                        f"/v1/{path}", headers=bearer(key), json=body | extra
                    )
                    assert answer.is_success, answer.text

    run_tidy(main)
    found = [made.cache_salt for made in streams.calls]
    assert found[::2] == found[1::2], "both routes do the same"
    return found[::2]


def test_the_caller_chooses_a_salt():
    assert salts(("key-a", {}), ("key-b", {"cache_salt": "mine"})) == ["", "mine"]
    assert salts(("key-a", {"cache_salt": None}), ("key-a", {"cache_salt": ""})) == ["", ""]


def test_each_key_can_be_a_tenant_of_its_own():
    a, a_mine, b, again = salts(
        ("key-a", {}),
        ("key-a", {"cache_salt": "mine"}),
        ("key-b", {}),
        ("key-a", {}),
        salt_by_key=True,
    )
    assert a == again
    assert len({a, a_mine, b, ""}) == 4
    assert not any("key-" in salt for salt in (a, a_mine, b)), "ranks must not see keys"


def test_a_salt_that_forges_another_tenants_is_another_one():
    (a,) = salts(("key-a", {}), salt_by_key=True)
    (forged,) = salts(("key-b", {"cache_salt": a}), salt_by_key=True)
    assert forged != a


@pytest.mark.parametrize("salt", ["x" * 257, 7, ["x"]])
def test_a_salt_that_is_none_is_refused(salt):
    response = ask("POST", "/v1/completions", Keys(), json=TEXT | {"cache_salt": salt})
    assert error_of(response, 400)["param"] == "cache_salt"


def test_half_a_surrogate_pair_is_no_salt():
    response = ask(
        "POST",
        "/v1/completions",
        Keys(),
        content=b'{"prompt": "x", "cache_salt": "\\ud800"}',
        headers={"Content-Type": "application/json"},
    )
    assert error_of(response, 400)["param"] == "cache_salt"
