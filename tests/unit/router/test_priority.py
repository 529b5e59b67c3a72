"""A request's priority, from each front to each leg."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from core.wire import Role, SamplingParams
from tests.support.doors import http_client, make_door, services
from tests.support.eventually import run_tidy
from tests.support.fake_streams import FakeStreams, says
from tests.support.fronts import PROMPT, front, release_all, settle, tokens
from tests.support.http_calls import CHAT, TEXT, error_of, post
from tests.support.rpc_calls import Client, all_of, asks, call


def test_both_http_routes_pass_it_on():
    streams = FakeStreams(says("ok"))

    async def main() -> None:
        async with http_client(services(make_door(streams))) as client:
            for extra in ({"priority": -3}, {}, {"priority": None}):
                for path, body in (("completions", TEXT), ("chat/completions", CHAT)):
                    assert (await client.post(f"/v1/{path}", json=body | extra)).is_success

    run_tidy(main)
    assert [made.priority for made in streams.calls] == [-3, -3, 0, 0, 0, 0]


@pytest.mark.parametrize("priority", [1001, -1001, "high", 0.5])
def test_what_is_none_is_refused(priority: Any):
    error = error_of(post("/v1/completions", TEXT | {"priority": priority}), 400)
    assert error["param"] == "priority"


def test_grpc_passes_it_on():
    async def use(client: Client) -> list[int]:
        for options in ({"priority": -7}, {}):
            await all_of(client.stub.Generate(asks(**options)))
        return [made.priority for made in client.streams.calls]

    assert call(use) == [-7, 0]


def test_every_leg_has_it():
    async def main() -> None:
        async with front(Role.PREFILL, Role.DECODE) as it:
            params = SamplingParams(max_new_tokens=3)
            stream = it.dispatcher.stream("r", PROMPT, params, priority=5)

            async def collect() -> list[Any]:
                async with aclosing(stream) as chunks:
                    return [chunk async for chunk in chunks]

            task = asyncio.create_task(collect())
            await settle()
            assert [leg.request.priority for c in it.fleet.live for leg in c.legs] == [5, 5]
            await release_all(it.fleet)
            assert len(tokens(await task)) == 3

    run_tidy(main)
