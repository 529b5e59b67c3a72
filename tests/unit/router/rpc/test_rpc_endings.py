"""Deadlines, cancellation, Abort and slow readers: a request stops when nobody waits for it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from router.keys import Keys
from router.rpc.gen import antiphon_pb2 as pb
from router.rpc.service import AntiphonService
from tests.support.doors import make_door
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_streams import HANG, FakeStreams, chunk, says
from tests.support.rpc_calls import Client, all_of, asks, call, deltas_of, says_hi, text_of


def stalls(_) -> list:
    return [chunk(0, 65), HANG]


@pytest.mark.parametrize("script", [stalls, lambda _: [HANG]])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_cancels_stops_every_stream(script, n):
    async def use(client: Client) -> None:
        stream = client.stub.Generate(asks(n=n))
        await eventually(lambda: len(client.streams.calls) == n)
        if script is stalls:
            assert (await stream.read()).choices[0].text == "A"
        stream.cancel()
        await eventually(lambda: all(c.closed_early for c in client.streams.calls))
        await eventually(lambda: client.door.running == client.door.admission.live == 0)

    call(use, script)


def test_a_client_whose_connection_goes_stops_its_streams():
    async def use(client: Client) -> None:
        stream = client.stub.Generate(asks())
        await stream.read()
        await client.channel.close()
        await eventually(lambda: client.streams.calls[0].closed_early)

    call(use, stalls)


def test_a_deadline_stops_the_request_and_tells_the_client():
    async def use(client: Client) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await all_of(client.stub.Chat(says_hi(), timeout=0.2))
        await eventually(lambda: client.streams.calls[0].closed_early)
        await eventually(lambda: client.door.running == 0)
        return caught.value.code()

    assert call(use, stalls) is grpc.StatusCode.DEADLINE_EXCEEDED


class Patient:
    """A context whose transport never ends a call by itself."""

    def __init__(self) -> None:
        self.messages: list = []
        self.code: grpc.StatusCode | None = None

    def time_remaining(self) -> float:
        return 0.02

    def invocation_metadata(self) -> tuple:
        return ()

    async def write(self, message) -> None:
        self.messages.append(message)

    async def abort(self, code, details, trailing_metadata=()) -> None:
        self.code = code
        raise grpc.aio.AbortError(details)


def test_the_front_door_counts_down_as_well_and_says_the_same():
    context = Patient()
    door = make_door(FakeStreams(stalls))

    async def main() -> None:
        with pytest.raises(grpc.aio.AbortError, match="deadline"):
            await AntiphonService(door, list, Keys()).Generate(asks(n=2), context)
        assert door.running == 0

    run_tidy(main)
    assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED
    ends = [deltas_of(context.messages, i)[-1].finish_reason for i in (0, 1)]
    assert ends == [pb.FINISH_REASON_ABORT] * 2


@pytest.mark.parametrize("request_id", ["mine", ""])
def test_abort_ends_exactly_one_request_with_what_it_has(request_id):
    async def use(client: Client) -> None:
        other = client.stub.Generate(asks(request_id="mine-too"))
        assert (await other.read()).request_id == "mine-too"
        stream = client.stub.Generate(asks(n=2, request_id=request_id))
        first = await stream.read()
        abort = client.stub.Abort
        assert not (await abort(pb.AbortRequest(request_id=first.request_id[:-1]))).found
        assert (await abort(pb.AbortRequest(request_id=first.request_id))).found
        messages = [first, *await all_of(stream)]
        for index in (0, 1):
            assert text_of(messages, index) == "A"
            assert deltas_of(messages, index)[-1].finish_reason == pb.FINISH_REASON_ABORT
        assert messages[-1].usage.completion_tokens == 2
        assert [c.closed for c in client.streams.calls] == [False, True, True]
        assert not (await abort(pb.AbortRequest(request_id=first.request_id))).found
        other.cancel()

    call(use, stalls)


def test_abort_before_the_first_token():
    async def use(client: Client) -> list:
        stream = client.stub.Generate(asks(request_id="mine"))
        await eventually(lambda: client.streams.calls)
        assert (await client.stub.Abort(pb.AbortRequest(request_id="mine"))).found
        return await all_of(stream)

    (only,) = deltas_of(call(use, lambda _: [HANG]))
    assert (only.text, only.finish_reason) == ("", pb.FINISH_REASON_ABORT)


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    async def use(client: Client) -> None:
        stream = client.stub.Generate(asks(request_id="mine"))
        await stream.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await all_of(client.stub.Generate(asks(request_id="mine")))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "mine" in caught.value.details()
        stream.cancel()
        await eventually(lambda: client.door.running == 0)
        client.streams.script = says("again")
        assert text_of(await all_of(client.stub.Generate(asks(request_id="mine")))) == "again"

    call(use, stalls)


CHUNKS, SIZE = 3000, 400  # 1.2 MB of text and 1.2 MB of ids: far more than a window


def flood(_) -> list:
    return [chunk(i * SIZE, *([97] * SIZE)) for i in range(CHUNKS)] + says("")(_)


def test_a_slow_reader_holds_up_its_own_stream_only_and_gets_all_of_it():
    async def use(client: Client) -> tuple[list, list]:
        slow = client.stub.Generate(asks())
        first = await slow.read()
        await eventually(lambda: client.streams.calls[0].closed, timeout_s=30)
        # the engine is through with the slow one, which is not through with its window
        assert client.door.running == 1
        quick = await all_of(client.stub.Generate(asks(max_tokens=1)))
        assert client.door.running == 1
        return [first, *await all_of(slow)], quick

    slow, quick = call(
        use,
        lambda c: says("ok")(c) if c.params.max_new_tokens == 1 else flood(c),
        context_len=10_000_000,
    )
    assert text_of(slow) == "a" * (CHUNKS * SIZE)
    assert text_of(quick) == "ok"
    # while the window was full, what came meanwhile was put together
    assert len(slow) < CHUNKS


def test_a_reader_that_is_stuck_can_leave():
    async def use(client: Client) -> None:
        stream = client.stub.Generate(asks())
        await stream.read()
        await eventually(lambda: client.streams.calls[0].closed, timeout_s=30)
        assert client.door.running == 1
        stream.cancel()
        await eventually(lambda: client.door.running == 0)

    call(use, flood, context_len=10_000_000)


def test_stopping_cancels_what_still_runs_after_the_grace():
    async def use(client: Client) -> grpc.StatusCode:
        stream = client.stub.Generate(asks())
        await stream.read()
        await client.front.stop(0.05)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await stream.read()
        await eventually(lambda: client.streams.calls[0].closed_early)
        return await stream.code()

    assert call(use, stalls) in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


def test_stopping_lets_a_stream_end_within_the_grace():
    async def use(client: Client) -> str:
        stream = client.stub.Generate(asks())
        first = await stream.read()
        stopping = asyncio.create_task(client.front.stop(5))
        gate.set()
        messages = [first, *await all_of(stream)]
        await stopping
        return text_of(messages)

    gate = asyncio.Event()

    def script(made):
        yield chunk(0, 65)
        while not gate.is_set():
            yield chunk(0)
        yield from says("nd")(made)

    assert call(use, script) == "And"
