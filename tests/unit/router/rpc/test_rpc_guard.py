"""Keys over gRPC: every call but health's shows one, and callers do not meet."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.keys import Keys
from router.rpc.gen import antiphon_pb2 as pb
from tests.support.eventually import eventually
from tests.support.fake_streams import HANG
from tests.support.rpc_calls import Client, all_of, asks, call, details_of

KEYS = Keys(["key-a", "key-b"], ["root"])
Code = grpc.StatusCode
INFO = "google.rpc.ErrorInfo"


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


CALLS = {
    "Generate": asks(),
    "Chat": pb.ChatRequest(),
    "Tokenize": pb.TokenizeRequest(text="x"),
    "Detokenize": pb.DetokenizeRequest(),
    "Abort": pb.AbortRequest(),
    "ListModels": pb.ListModelsRequest(),
    "GetLoad": pb.GetLoadRequest(),
}


def test_these_are_all_calls_of_the_service():
    assert set(CALLS) == set(pb.DESCRIPTOR.services_by_name["Antiphon"].methods_by_name)


async def answer(client: Client, method: str, **options: Any) -> Any:
    made = getattr(client.stub, method)(CALLS[method], **options)
    return await (all_of(made) if method in ("Generate", "Chat") else made)


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("metadata", [(), bearer("other"), (("authorization", "key-a"),)])
def test_a_call_without_a_key_is_unauthenticated(method, metadata):
    async def use(client: Client) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(client, method, metadata=metadata)
        assert not client.streams.calls
        return caught.value

    error = call(use, keys=KEYS)
    assert error.code() is Code.UNAUTHENTICATED
    assert details_of(error)[INFO].reason == "INVALID_API_KEY"
    assert "key-a" not in error.details()


def test_a_key_opens_every_method_and_nothing_is_asked_where_there_are_none():
    async def use(client: Client) -> None:
        assert await answer(client, "Generate", metadata=bearer("key-b"))
        await answer(client, "GetLoad", metadata=bearer("root"))

    call(use, keys=KEYS)
    assert call(lambda client: answer(client, "Generate"))


def test_health_is_open_and_reflection_is_not():
    async def use(client: Client) -> None:
        health = health_pb2_grpc.HealthStub(client.channel)
        said = await health.Check(health_pb2.HealthCheckRequest())
        assert said.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        listed = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflection.ServerReflectionInfo(iter([listed])).read()
        assert caught.value.code() is Code.UNAUTHENTICATED
        stream = reflection.ServerReflectionInfo(iter([listed]), metadata=bearer("key-a"))
        assert (await stream.read()).list_services_response.service
        stream.cancel()

    call(use, keys=KEYS)


def test_the_salt_of_a_call():
    async def use(client: Client) -> list[str]:
        for key, salt in (("key-a", "mine"), ("key-a", ""), ("key-b", "mine")):
            await all_of(client.stub.Generate(asks(cache_salt=salt), metadata=bearer(key)))
        return [made.cache_salt for made in client.streams.calls]

    assert call(use, keys=KEYS) == ["mine", "", "mine"]
    assert len({*call(use, keys=KEYS, salt_by_key=True), "mine", ""}) == 5


def test_request_ids_of_different_callers_do_not_meet():
    async def use(client: Client) -> None:
        mine, theirs = (
            client.stub.Generate(asks(request_id="r"), metadata=bearer(key))
            for key in ("key-a", "key-b")
        )
        ends = [asyncio.create_task(all_of(stream)) for stream in (mine, theirs)]
        await eventually(lambda: len(client.streams.calls) == 2)
        abort = pb.AbortRequest(request_id="r")
        assert not (await client.stub.Abort(abort, metadata=bearer("root"))).found
        assert (await client.stub.Abort(abort, metadata=bearer("key-b"))).found
        assert (await ends[1])[-1].choices[0].finish_reason == pb.FINISH_REASON_ABORT
        assert client.door.running == 1
        mine.cancel()
        await asyncio.gather(ends[0], return_exceptions=True)

    call(use, lambda _: [HANG], keys=KEYS)
