"""A gRPC front over scripted token streams on a real loopback port, and short ways to call it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from router.frontdoor import FrontDoor
from router.keys import Keys
from router.readiness import Readiness
from router.rpc.gen import antiphon_pb2 as pb, antiphon_pb2_grpc
from router.rpc.server import RpcFront, RpcServices
from tests.support.doors import OPEN, make_door
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_streams import FakeStreams, says

HOST = "127.0.0.1"
OK = says("ok")


@dataclass
class Client:
    """A generated client, and what is behind it."""

    stub: Any
    channel: grpc.aio.Channel
    port: int
    door: FrontDoor
    streams: FakeStreams
    front: RpcFront


async def _ready() -> Readiness:
    return Readiness(ready=True)


@asynccontextmanager
async def rpc_client(
    script: Callable = OK,
    *,
    ready: Callable[[], Awaitable[Readiness]] = _ready,
    members: Callable = list,
    body_limit_mib: int = 1,
    keys: Keys = OPEN,
    options: tuple = (),
    **door: Any,
) -> AsyncIterator[Client]:
    before = asyncio.all_tasks()
    streams = FakeStreams(script)
    behind = make_door(streams, **door)
    front = RpcFront(
        RpcServices(
            door=behind, ready=ready, members=members, body_limit_mib=body_limit_mib, keys=keys
        )
    )
    port = front.bind(HOST, 0)
    await front.start()
    try:
        async with grpc.aio.insecure_channel(f"{HOST}:{port}", options=options) as channel:
            stub = antiphon_pb2_grpc.AntiphonStub(channel)
            yield Client(stub, channel, port, behind, streams, front)
    finally:
        await front.stop(0)
        # gRPC ends its calls in tasks of its own: an event that finds their loop closed is reported
        # in the loop of another test
        await eventually(lambda: asyncio.all_tasks() <= before)


def call(use: Callable[[Client], Awaitable[Any]], script: Callable = OK, **wiring) -> Any:
    """The result of ``use`` on a client of a front whose streams play ``script``."""
    results = []

    async def main() -> None:
        async with rpc_client(script, **wiring) as client:
            results.append(await use(client))

    run_tidy(main)
    return results[0]


def asks(text: str = "hi", **options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, options=pb.GenerationOptions(**options))


def says_hi(**options: Any) -> pb.ChatRequest:
    message = pb.ChatMessage(role="user", content="hi")
    return pb.ChatRequest(messages=[message], options=pb.GenerationOptions(**options))


async def all_of(stream: Any) -> list:
    """What is still to come of a stream, also after single reads."""
    messages = []
    while (message := await stream.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def generate(request: Message, script: Callable = OK, **wiring: Any) -> list:
    """Every message of one Generate or Chat call."""

    async def use(client: Client) -> list:
        chat = isinstance(request, pb.ChatRequest)
        return await all_of((client.stub.Chat if chat else client.stub.Generate)(request))

    return call(use, script, **wiring)


def deltas_of(messages: list, index: int = 0) -> list:
    every = itertools.chain.from_iterable(message.choices for message in messages)
    return [delta for delta in every if delta.index == index]


def text_of(messages: list, index: int = 0) -> str:
    return "".join(delta.text for delta in deltas_of(messages, index))


def details_of(error: grpc.RpcError) -> dict[str, Message]:
    """The google.rpc details, by the name of their type."""
    status: status_pb2.Status = rpc_status.from_call(_AsCall(error))
    assert status.message == error.details()
    found = {}
    for packed in status.details:
        detail = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
        assert packed.Unpack(detail)
        found[packed.TypeName()] = detail
    return found


class _AsCall:
    """What grpc_status reads of a call, from the error of an asyncio one."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code, self.details = error.code, error.details
        self.trailing_metadata = error.trailing_metadata


def fails(
    request: Message, code: grpc.StatusCode, script: Callable = OK, **wiring: Any
) -> grpc.aio.AioRpcError:
    """The error of a Generate or Chat call that must end with ``code``."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        generate(request, script, **wiring)
    assert caught.value.code() is code, caught.value
    return caught.value
