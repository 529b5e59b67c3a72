"""Short ways to call the HTTP front over scripted token streams."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.support.doors import http_client, make_door, services
from tests.support.eventually import run_tidy
from tests.support.fake_streams import FakeStreams, says

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
OK = says("ok")


def call(
    use: Callable[[httpx.AsyncClient], Awaitable[Any]],
    script: Callable = OK,
    *,
    door: dict[str, Any] | None = None,
    **wiring: Any,
) -> Any:
    """The result of ``use`` on a client of an app whose streams play ``script``."""
    results = []

    async def main() -> None:
        async with http_client(
            services(make_door(FakeStreams(script), **(door or {})), **wiring)
        ) as client:
            results.append(await use(client))

    run_tidy(main)
    return results[0]


def post(path: str, body: Any, script: Callable = OK, **wiring: Any) -> httpx.Response:
    return call(lambda client: client.post(path, json=body), script, **wiring)


def post_bytes(path: str, content: Any) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return call(lambda client: client.post(path, content=content, headers=headers))


def get(path: str, **wiring: Any) -> httpx.Response:
    return call(lambda client: client.get(path), **wiring)


def sse_events(response: httpx.Response) -> list[Any]:
    """The JSON of each event; the last must be ``[DONE]``, which is left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    datas = [e.removeprefix("data: ") for e in response.text.strip().split("\n\n")]
    assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
