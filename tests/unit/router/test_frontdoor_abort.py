"""FrontDoor.abort: one request, by its exact id, at any time of its life."""

from __future__ import annotations

import asyncio
import threading

from core.metrics import PrometheusSink
from core.wire import FinishReason, SamplingParams
from router.frontdoor import FrontDoor
from router.text.request import TextEvent, TextRequest
from tests.support.doors import make_door
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_streams import HANG, FakeStreams, chunk

SAMPLING = SamplingParams(max_new_tokens=0)


def asks(rid: str, prompt: str = "hi", n: int = 1) -> TextRequest:
    return TextRequest(rid=rid, prompts=(prompt,), n=n, sampling=SAMPLING)


async def collect(door: FrontDoor, request: TextRequest) -> list[TextEvent]:
    async with door.open(request) as stream:
        return [event async for step in stream for event in step]


def test_a_running_request_ends_with_what_it_has_and_no_other_does():
    sink = PrometheusSink()
    streams = FakeStreams(lambda _: [chunk(0, 65), HANG])

    async def main() -> None:
        door = make_door(streams, sink=sink)
        one = asyncio.create_task(collect(door, asks("r-1", n=2)))
        other = asyncio.create_task(collect(door, asks("r-12")))
        await eventually(lambda: len(streams.calls) == 3)
        assert not door.abort("r-")
        assert door.abort("r-1")
        events = await one
        assert [event.text for event in events if event.text] == ["A", "A"]
        assert [e.index for e in events if e.finish is FinishReason.ABORT] == [0, 1]
        assert (door.running, other.done(), door.abort("r-1")) == (1, False, False)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)

    run_tidy(main)
    assert 'antiphon_requests_total{status="aborted"} 2.0' in sink.render().decode()


def test_a_request_whose_prompt_is_still_being_encoded():
    streams = FakeStreams(lambda _: [HANG])
    begun, go_on = threading.Event(), threading.Event()

    async def main() -> None:
        door = make_door(streams, context_len=100_000)
        encode = door.tokenizer.encode

        def slow(text: str, *, add_special: bool) -> list[int]:
            begun.set()
            assert go_on.wait(10)
            return encode(text, add_special=add_special)

        door.tokenizer.encode = slow
        asked = asyncio.create_task(collect(door, asks("r", "x" * 20_000)))
        await eventually(begun.is_set)
        assert door.abort("r")
        go_on.set()
        (event,) = await asked
        assert event.finish is FinishReason.ABORT

    run_tidy(main)


def test_an_abort_that_comes_with_the_last_token_changes_nothing():
    streams = FakeStreams(lambda _: [chunk(0, 65), chunk(1, 257, finish=FinishReason.STOP)])

    async def main() -> None:
        door = make_door(streams)
        async with door.open(asks("r")) as stream:
            events: list[TextEvent] = []
            async for step in stream:
                events += step
                if events[-1].finish:
                    assert door.abort("r")
        assert [event.finish for event in events] == [None, FinishReason.STOP]
        assert not stream.aborted

    run_tidy(main)
