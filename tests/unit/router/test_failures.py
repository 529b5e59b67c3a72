"""Clients hear plain words and a request id; what ranks say is in the log, under the same id."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from core.errors import (
    AntiphonError,
    EngineError,
    ModelNotFound,
    Overloaded,
    RankLost,
    RequestError,
    TransferError,
    Unavailable,
)
from core.wire import KV_DIFFERS, ErrorKind, StreamError
from disagg.geometry import PageGeometry, mismatch
from router.failures import INTERNAL, plain, stream_error, told
from tests.support.fake_streams import chunk, failure
from tests.support.http_calls import CHAT, post

# what ranks, links and transports say of themselves
INSIDES = "decode/0/0@10.1.2.3:45678#ab12: room 1234567 of /models/x: the link ended"
SECRET = re.compile(r"decode|prefill/|10\.1\.2\.3|45678|1234567|/models|ab12")
STATUS = {
    ErrorKind.INVALID: 400,
    ErrorKind.OVERLOADED: 429,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.INTERNAL: 500,
}


def said_of(response: httpx.Response) -> dict[str, Any]:
    """The error, of a plain answer or of the last event of a stream."""
    text = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
    return json.loads(text)["error"]


@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("first", [(), (chunk(0, 65),)], ids=["at once", "in the middle"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_rank_that_fails_tells_nothing_of_the_cluster(kind, first, stream, caplog):
    body = CHAT | {"stream": stream}
    response = post("/v1/chat/completions", body, lambda _: [*first, failure(kind, INSIDES)])
    assert response.status_code == (200 if stream and first else STATUS[kind])
    error = said_of(response)
    assert not SECRET.search(json.dumps(error))
    (rid,) = re.findall(r"\(request id (chatcmpl-\w+)\)$", error["message"])
    logged = [
        r for r in caplog.records if INSIDES in r.getMessage() and getattr(r, "rid", "") == rid
    ]
    assert logged
    assert max(r.levelname for r in logged) == "WARNING"  # it is seen at the default level


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_tells_the_id_and_nothing_else(stream, caplog):
    def script(_: object) -> Any:
        raise ZeroDivisionError(INSIDES)

    response = post("/v1/chat/completions", CHAT | {"stream": stream}, script)
    (rid,) = re.findall(r"^internal error: .* \(request id (\S+)\)$", said_of(response)["message"])
    assert not SECRET.search(response.text)
    (record,) = [r for r in caplog.records if r.exc_info]
    assert (record.rid, record.levelname) == (rid, "ERROR")
    assert INSIDES in str(record.exc_info[1])


def test_how_two_ranks_differ_is_told():
    one = PageGeometry(kind="mha", slot_bytes=(4, 4), dtype="float32", revision="r")
    other = PageGeometry(kind="mha", slot_bytes=(2, 2), dtype="bfloat16", revision="r")
    words = mismatch(one, other)
    assert words is not None
    assert words.startswith(KV_DIFFERS)
    detail = f"decode/0/0@10.1.2.3:45678: {words}; no other route within 30 s"
    error = stream_error(StreamError(kind=ErrorKind.UNAVAILABLE, message=detail))
    assert str(error) == (
        "no worker could finish the request: KV geometry differs: "
        "slot_bytes is '8 bytes in 2 regions' at the prefill rank, "
        "'4 bytes in 2 regions' at the decode rank; "
        "dtype is 'float32' at the prefill rank, 'bfloat16' at the decode rank"
        "; no other route within 30 s"
    )
    assert error.detail == detail
    assert plain("anything else", "plain words") == "plain words"


def test_the_front_doors_own_words_to_callers_stay_as_they_are():
    for error in (RequestError("n must be 1", param="n"), ModelNotFound("no"), Overloaded("full")):
        assert told(error, "r") is error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (Unavailable("no complete route within 30 s"), Unavailable, "no complete route"),
        (EngineError(INSIDES), EngineError, INTERNAL),
        (RankLost(INSIDES), EngineError, INTERNAL),
        (TransferError(INSIDES), EngineError, INTERNAL),
        (KeyError(INSIDES), EngineError, INTERNAL),
    ],
)
def test_all_else_has_the_request_id_and_its_words_as_detail(error, kind, words):
    made = told(error, "r-1")
    assert isinstance(made, AntiphonError)
    assert type(made) is kind
    assert str(made).startswith(words)
    assert str(made).endswith("(request id r-1)")
    assert made.detail == str(error)


def test_when_to_come_back_is_kept():
    error = stream_error(StreamError(kind=ErrorKind.OVERLOADED, message=INSIDES))
    error.retry_after_s = 7.0
    made = told(error, "r")
    assert isinstance(made, Overloaded)
    assert made.retry_after_s == 7.0


def test_a_stream_without_words_for_its_error_is_a_defect():
    error = stream_error(None)
    assert isinstance(error, EngineError)
    assert "no words" in error.detail
