"""What a client sent comes back cut to a length one can read, wherever it is quoted."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import pytest
from fastapi import FastAPI

from cluster.dump import DumpBoard
from cluster.serve import operations
from cluster.supervisor import Hooks, Supervisor
from core.clock import VirtualClock
from core.errors import RequestError
from router.admin import add_operations
from router.echo import ECHO_CHARS, clipped, quoted
from router.live import LiveStreams
from router.openai.errors import install_error_handlers
from router.replicas import Replicas
from tests.support.fake_launcher import FakeLauncher
from tests.support.fake_ranks import Fleet
from tests.support.http_calls import CHAT, TEXT, error_of, get, post
from tests.support.rpc_calls import asks, fails

CLOCK = VirtualClock()

LONG = "x" * (1 << 19)
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_short_words_stay_and_long_ones_end_in_dots():
    assert (clipped("a" * ECHO_CHARS), clipped(7)) == ("a" * ECHO_CHARS, "7")
    assert clipped(LONG) == "x" * ECHO_CHARS + "..."
    assert (quoted("it's"), quoted("a\n")) == ('"it\'s"', r"'a\n'")
    assert quoted(LONG) == repr("x" * ECHO_CHARS) + "..."


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, TEXT | {"model": LONG}, 404),
        (CHATS, {"messages": [{"role": LONG, "content": "x"}]}, 400),
        (CHATS, {"messages": [{"role": {"a": LONG}, "content": "x"}]}, 400),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}, 400),
        (CHATS, CHAT | {"best_of": LONG}, 400),
        (COMPLETIONS, TEXT | {"logit_bias": {LONG: 1}}, 400),
        (COMPLETIONS, {"prompt": [10**4000]}, 400),
        (COMPLETIONS, TEXT | {"max_tokens": 10**4000}, 400),
        (COMPLETIONS, TEXT | {"min_tokens": 10**4000}, 400),
    ],
)
def test_a_refused_body_is_not_sent_back_whole(path, body, status):
    error = error_of(post(path, body), status)
    assert len(error["message"]) < 400
    assert "..." in error["message"]
    assert len(error["param"] or "") < 100


def test_words_of_a_chat_template_are_cut_too():
    template = "{{ raise_exception(messages[0]['content']) }}"
    body = {"messages": [{"role": "user", "content": LONG}]}
    error = error_of(post(CHATS, body, door={"template": template, "context_len": 1 << 20}), 400)
    assert len(error["message"]) < 400


def test_a_path_nobody_knows():
    for response in (get(f"/{LONG[:5000]}"), get(f"/v1/models/{LONG[:5000]}")):
        message = error_of(response, 404)["message"]
        assert "xxx..." in message or "xxx'..." in message
        assert len(message) < 400


def test_grpc_as_well():
    error = fails(asks(model=LONG), grpc.StatusCode.NOT_FOUND)
    assert len(error.details()) < 400
    assert "does not exist: this server has 'owner/tiny'" in error.details()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/admin/scale", {"replicas": {}, LONG: 1}),
        ("/admin/scale", {"replicas": {LONG: 1}}),
        ("/admin/drain", {"rank": LONG}),
        ("/admin/drain", {"rank": f"{LONG}/0"}),
    ],
)
def test_operations_as_well(path, body):
    app = FastAPI()
    install_error_handlers(app)
    desired = {"prefill": 1, "decode": 1}
    supervisor = Supervisor(FakeLauncher(), lambda _: None, Hooks(*[None] * 3), CLOCK, desired)
    add_operations(app, operations(None, supervisor))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body)

    assert len(error_of(asyncio.run(ask()), 400)["message"]) < 400


def test_a_dump_as_well():
    async def ask() -> None:
        await DumpBoard(LiveStreams(CLOCK), Replicas(Fleet().connect)).dump(LONG)

    with pytest.raises(RequestError) as refused:
        asyncio.run(ask())
    assert len(str(refused.value)) < 400
