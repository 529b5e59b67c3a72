"""A model may have several names; an answer carries the one that was asked for."""

from __future__ import annotations

import pytest

from tests.support.http_calls import CHAT, TEXT, error_of, get, post, sse_events

DOOR = {"aliases": ("small", "owner/tiny", "small")}


@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": ""}])
def test_no_name_means_the_model_that_is_served(body):
    for path, rest in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        assert post(path, rest | body, door=DOOR).json()["model"] == "owner/tiny"


@pytest.mark.parametrize(("asked", "echoed"), [("small", "small"), ("owner/tiny",) * 2, ("",) * 2])
def test_an_answer_carries_the_name_that_was_asked_for(asked, echoed):
    echoed = echoed or "owner/tiny"
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        asking = body | {"model": asked}
        assert post(path, asking, door=DOOR).json()["model"] == echoed
        chunks = sse_events(post(path, asking | {"stream": True}, door=DOOR))
        assert {chunk["model"] for chunk in chunks} == {echoed}


def test_every_name_is_listed_once_with_its_card():
    cards = get("/v1/models", door=DOOR).json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [
        ("owner/tiny", "owner/tiny"),
        ("small", "owner/tiny"),
    ]
    assert get("/v1/models/small", door=DOOR).json() == cards[1]


def test_another_name_is_refused_with_those_there_are():
    body = CHAT | {"model": "large"}
    message = error_of(post("/v1/chat/completions", body, door=DOOR), 404)["message"]
    assert message == "the model 'large' does not exist: this server has 'owner/tiny', 'small'"
    error_of(get("/v1/models/large", door=DOOR), 404)
