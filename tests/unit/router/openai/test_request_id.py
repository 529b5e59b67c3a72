"""Every answer has one x-request-id: the client's, or one drawn here."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from core.errors import Overloaded, Unavailable
from core.wire import ErrorKind
from router.keys import Keys
from router.readiness import Readiness
from tests.support.fake_streams import chunk, failure
from tests.support.http_calls import CHAT, OK, TEXT, call

STREAM = TEXT | {"stream": True}
COMPLETE = ("POST", "/v1/completions")


def broken(_: Any) -> list[Any]:
    return [ZeroDivisionError("a defect")]


async def defect() -> Readiness:
    raise ZeroDivisionError


def full(_: Any) -> list[Any]:
    return [Overloaded("too many", retry_after_s=1.0)]


def gone(_: Any) -> list[Any]:
    return [Unavailable("no rank")]


def late(_: Any) -> list[Any]:
    return [chunk(0, 65), failure(ErrorKind.INTERNAL, "broke")]


def answer(
    route: tuple[str, str] = COMPLETE,
    body: Any = None,
    script: Any = OK,
    sent: str | bytes | None = None,
    **wiring: Any,
) -> httpx.Response:
    headers = {} if sent is None else {"x-request-id": sent}
    return call(lambda client: client.request(*route, json=body, headers=headers), script, **wiring)


CASES = [
    (200, COMPLETE, TEXT, OK, {}),
    (200, COMPLETE, STREAM, OK, {}),
    (200, COMPLETE, STREAM, late, {}),
    (200, ("GET", "/health"), None, OK, {}),
    (400, COMPLETE, {}, OK, {}),
    (400, COMPLETE, TEXT | {"max_tokens": 2000}, OK, {}),
    (401, COMPLETE, TEXT, OK, {"keys": Keys(["key"])}),
    (403, ("GET", "/admin/dump"), None, OK, {"keys": Keys(["key"], local=False)}),
    (404, ("GET", "/nowhere"), None, OK, {}),
    (404, ("POST", "/v1/chat/completions"), CHAT | {"model": "other"}, OK, {}),
    (405, ("GET", "/v1/completions"), None, OK, {}),
    (413, COMPLETE, {"prompt": "x" * (1 << 20)}, OK, {}),
    (429, COMPLETE, TEXT, full, {}),
    (429, COMPLETE, STREAM, full, {}),
    (500, COMPLETE, TEXT, broken, {}),
    (500, ("GET", "/ready"), None, OK, {"ready": defect}),
    (503, COMPLETE, STREAM, gone, {}),
]


@pytest.mark.parametrize(("status", "route", "body", "script", "wiring"), CASES)
def test_every_answer_says_its_request_in_the_clients_word_or_in_one_of_ours(
    status, route, body, script, wiring
):
    theirs = answer(route, body, script, sent="their-id_1", **wiring)
    assert theirs.status_code == status
    assert theirs.headers.get_list("x-request-id") == ["their-id_1"]
    ours = [answer(route, body, script, **wiring).headers["x-request-id"] for _ in range(2)]
    assert all(len(word) > 30 for word in ours)
    assert ours[0] != ours[1]


@pytest.mark.parametrize("body", [TEXT, STREAM])
def test_a_generation_that_the_client_has_not_named_has_the_id_of_its_answer(body):
    response = answer(body=body)
    assert f'"id":"{response.headers["x-request-id"]}"' in response.text


def test_the_log_knows_both_ids(caplog):
    caplog.set_level(logging.INFO)
    rid = answer(body=TEXT, sent="theirs").json()["id"]
    assert rid != "theirs"
    (record,) = [r for r in caplog.records if "theirs" in r.getMessage()]
    assert record.rid == rid


def test_a_request_that_failed_here_has_the_id_that_its_error_names():
    response = answer(body=TEXT, script=gone)
    assert response.headers["x-request-id"] in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "odd", ["", "x" * 129, "two words", "a,b", "<script>", "é".encode("latin-1"), b"a\x7f", 'a"b']
)
def test_an_odd_id_is_not_repeated(odd):
    for body in (TEXT, {}):
        said = answer(body=body, sent=odd).headers["x-request-id"]
        assert said.startswith(("cmpl-", "req-"))


def test_the_longest_plain_id_is_repeated():
    longest = "aZ09._:/+=@-".ljust(128, "x")
    assert answer(body=TEXT, sent=longest).headers["x-request-id"] == longest
