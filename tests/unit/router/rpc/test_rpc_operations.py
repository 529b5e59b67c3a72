"""Tokens, models, load, health and reflection."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from core.config import RouterConfig
from core.errors import PreflightError
from core.wire import Incarnation, LoadReport, RankId, Role
from router.readiness import Readiness
from router.replicas import Member, Replica
from router.rpc import health
from router.rpc.gen import antiphon_pb2 as pb
from router.rpc.server import SERVICE, RpcFront, RpcServices
from tests.support.doors import make_door
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_streams import HANG, FakeStreams, says
from tests.support.rpc_calls import HOST, Client, asks, call, text_of

Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# --- tokens ---


def unary(method: str, request, **wiring):
    return call(lambda client: getattr(client.stub, method)(request), **wiring)


@pytest.mark.parametrize("text", ["hé", "", "x" * 20_000])
def test_a_text_becomes_tokens_and_text_again(text):
    ids = unary("Tokenize", pb.TokenizeRequest(text=text)).token_ids
    assert list(ids) == list(text.encode())
    assert unary("Detokenize", pb.DetokenizeRequest(token_ids=ids)).text == text


def test_a_conversation_becomes_its_prompt():
    said = pb.Conversation(messages=[pb.ChatMessage(role="user", content="hi")])
    ids = unary("Tokenize", pb.TokenizeRequest(conversation=said)).token_ids
    assert bytes(ids).decode() == "<user>hi\n<assistant>"


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("Tokenize", pb.TokenizeRequest(), Code.INVALID_ARGUMENT),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation()), Code.INVALID_ARGUMENT),
        ("Tokenize", pb.TokenizeRequest(text="x", model="gpt"), Code.NOT_FOUND),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[258]), Code.INVALID_ARGUMENT),
        ("Detokenize", pb.DetokenizeRequest(model="gpt"), Code.NOT_FOUND),
    ],
)
def test_what_cannot_be_tokenized(method, request_, code):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        unary(method, request_)
    assert caught.value.code() is code


# --- models and load ---


def test_the_model_says_what_it_is():
    (model,) = unary("ListModels", pb.ListModelsRequest()).models
    assert model == pb.Model(
        name="owner/tiny", context_len=1000, vocab_size=258, eos_token_ids=[257]
    )


def test_every_name_of_the_model_works():
    aliases = ("small",)
    models = unary("ListModels", pb.ListModelsRequest(), aliases=aliases).models
    assert [model.name for model in models] == ["owner/tiny", "small"]
    ids = unary("Tokenize", pb.TokenizeRequest(text="x", model="small"), aliases=aliases).token_ids
    assert list(ids) == [120]


def member(group: str, role: Role) -> Member:
    rank = RankId(group=group)
    return Member(Incarnation(rank=rank, endpoint="127.0.0.1:1", nonce="n"), role)


def test_the_load_of_the_router_and_its_ranks():
    up, down = member("prefill", Role.PREFILL), member("decode", Role.DECODE)
    load = LoadReport(waiting_requests=1, free_pages=7, total_pages=9, running_requests=2)
    replica = Replica(SimpleNamespace(incarnation=up.incarnation, load=load), Role.PREFILL)
    replica.book(100)

    async def use(client: Client) -> pb.GetLoadResponse:
        stream = client.stub.Generate(asks(n=2))
        await eventually(lambda: len(client.streams.calls) == 2)
        answer = await client.stub.GetLoad(pb.GetLoadRequest())
        stream.cancel()
        return answer

    answer = call(use, lambda _: [HANG], members=lambda: [(up, replica), (down, None)], limit=9)
    assert (answer.running_requests, answer.live_choices, answer.choice_limit) == (1, 2, 9)
    decode, prefill = answer.ranks
    assert decode == pb.RankLoad(rank="decode/0/0", role="decode")
    assert prefill == pb.RankLoad(
        rank="prefill/0/0",
        role="prefill",
        up=True,
        outstanding_requests=1,
        outstanding_tokens=100,
        waiting_requests=1,
        running_requests=2,
        free_pages=7,
        total_pages=9,
    )


# --- health ---


class Readable:
    """Readiness that a test sets."""

    def __init__(self) -> None:
        self.ready = False

    async def __call__(self) -> Readiness:
        return Readiness(ready=self.ready)


@pytest.mark.parametrize("service", ["", "antiphon.v1.Antiphon"])
def test_health_follows_readiness_at_once(service):
    now = Readable()

    async def use(client: Client) -> list[int]:
        stub = health_pb2_grpc.HealthStub(client.channel)
        request = health_pb2.HealthCheckRequest(service=service)
        before = await stub.Check(request)
        now.ready = True
        after = await stub.Check(request)
        listed = await stub.List(health_pb2.HealthListRequest())
        assert listed.statuses[service].status == SERVING
        return [before.status, after.status]

    assert call(use, ready=now) == [NOT_SERVING, SERVING]


def test_who_watches_is_told(monkeypatch):
    monkeypatch.setattr(health, "WATCH_PERIOD_S", 0.005)
    now = Readable()

    async def use(client: Client) -> list[int]:
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
        seen = [(await watch.read()).status]
        for now.ready in (True, False):
            seen.append((await watch.read()).status)
        now.ready = True
        seen.append((await watch.read()).status)
        stopping = asyncio.create_task(client.front.stop(1))
        seen.append((await watch.read()).status)
        watch.cancel()
        await stopping
        return seen

    assert call(use, ready=now) == [NOT_SERVING, SERVING, NOT_SERVING, SERVING, NOT_SERVING]


def test_the_health_of_an_unknown_service():
    async def use(client: Client) -> None:
        stub = health_pb2_grpc.HealthStub(client.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() is Code.NOT_FOUND

    call(use)


# --- reflection ---


def discover_and_generate(port: int) -> tuple[set[str], str, str]:
    """A client that knows a port and nothing else: finds, builds and calls."""
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        names = set(database.get_services())
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
        asked, answered = map(
            message_factory.GetMessageClass, (method.input_type, method.output_type)
        )
        assert asked is not pb.GenerateRequest
        request = asked(text="hi")
        request.options.max_tokens = 5
        stream = channel.unary_stream(
            f"/{SERVICE}/{method.name}",
            request_serializer=asked.SerializeToString,
            response_deserializer=answered.FromString,
        )
        messages = list(stream(request, timeout=20))
        reason = messages[-1].choices[-1].finish_reason
        names_of = pool.FindEnumTypeByName("antiphon.v1.FinishReason").values_by_number
        return names, text_of(messages), names_of[reason].name


def test_a_client_that_knows_only_the_port():
    async def use(client: Client):
        return await asyncio.to_thread(discover_and_generate, client.port)

    names, text, reason = call(use, says("found"))
    assert names == {
        "antiphon.v1.Antiphon",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert (text, reason) == ("found", "FINISH_REASON_STOP")


# --- the port ---


def test_a_busy_port_names_the_key_and_the_way_out():
    async def use(client: Client) -> None:
        services = RpcServices(door=client.door, ready=Readable(), members=list)
        with pytest.raises(PreflightError, match=r"router\.grpc_port=.*router\.grpc=false"):
            RpcFront(services).bind(HOST, client.port)

    call(use)


def test_a_front_that_was_never_started_can_go():
    async def main() -> None:
        door = make_door(FakeStreams(says("ok")))
        front = RpcFront(RpcServices(door=door, ready=Readable(), members=list))
        assert front.bind(HOST, 0) > 0

    run_tidy(main)


def test_the_default_port():
    assert (RouterConfig().grpc, RouterConfig().grpc_port) == (True, 9000)
