"""When a client hangs up, its generation stops: streaming or not, reading or stuck."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from router.openai.app import make_app
from router.openai.sse import while_connected
from tests.support.asgi import RawCall
from tests.support.doors import make_door, services
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_streams import HANG, FakeStreams, chunk

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "n": 2}


def hung_up(body: dict[str, Any], *, waits_for_text: bool) -> None:
    streams = FakeStreams(lambda call: [chunk(0, 65), HANG] if waits_for_text else [HANG])
    app = make_app(services(make_door(streams)))

    async def main() -> None:
        call = RawCall(app, "/v1/chat/completions", body)
        await eventually(lambda: len(streams.calls) == 2)
        if waits_for_text:
            assert b'"content":"A"' in await call.writes.get()
        call.hang_up()
        await call.task
        assert [c.closed_early for c in streams.calls] == [True, True]

    run_tidy(main)


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(stream):
    hung_up(BODY | {"stream": stream}, waits_for_text=False)


def test_in_the_middle_of_a_stream():
    hung_up(BODY | {"stream": True}, waits_for_text=True)


def test_while_a_write_is_stuck():
    streams = FakeStreams(lambda call: [chunk(0, 65), chunk(1, 66), HANG])

    class Stuck(RawCall):
        async def _send(self, message: Message) -> None:
            await super()._send(message)
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

    async def main() -> None:
        call = Stuck(
            make_app(services(make_door(streams))), "/v1/chat/completions", BODY | {"stream": True}
        )
        await call.writes.get()
        call.hang_up()
        await call.task
        assert [c.closed_early for c in streams.calls] == [True, True]

    run_tidy(main)


def test_work_that_ends_first_gives_its_result():
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> int:
        return 7

    async def main() -> None:
        assert await while_connected(never, work()) == 7

    run_tidy(main)
