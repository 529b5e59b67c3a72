"""Both fronts over TLS, with and without certificates of clients, and commands that ask them."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import httpx
import pytest

from antiphon.remote import Remote
from bench.client import Access, connect
from bench.config import BenchConfig
from cluster.fronts import banner, listen
from core import presets
from core.clock import RealClock
from core.config import RouterConfig
from core.errors import PreflightError
from router.openai.app import make_app
from router.readiness import Readiness
from router.rpc.gen import antiphon_pb2 as pb, antiphon_pb2_grpc
from router.rpc.server import RpcFront, RpcServices
from tests.support.certificates import Authority
from tests.support.doors import make_door, services
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_streams import FakeStreams, says


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(authority):
    return authority.issue("server")


async def _ready() -> Readiness:
    return Readiness(ready=True)


def serve(server: tuple[Path, Path], use, client_ca: str = "") -> None:
    """Run ``use`` on the ports of both fronts."""
    cert, key = server
    config = RouterConfig(
        port=0, grpc_port=0, tls_cert=str(cert), tls_key=str(key), tls_client_ca=client_ca
    )

    async def main() -> None:
        door, stop, ports = make_door(FakeStreams(says("ok"))), asyncio.Event(), []
        app = make_app(services(door))
        rpc = RpcFront(RpcServices(door=door, ready=_ready, members=list))
        serving = asyncio.create_task(listen(config, app, rpc, lambda *p: ports.append(p), stop))
        await eventually(lambda: ports or serving.done())
        try:
            await use(*ports[0])
        finally:
            stop.set()
            await serving

    run_tidy(main)


async def models(port: int, ca: bytes, chain: tuple[bytes, bytes] = (None, None)) -> list[str]:
    """The models that gRPC names; ``chain`` is the client's key and certificate."""
    credentials = grpc.ssl_channel_credentials(ca, *chain)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        stub = antiphon_pb2_grpc.AntiphonStub(channel)
        listed = await stub.ListModels(pb.ListModelsRequest(), timeout=10)
    return [model.name for model in listed.models]


def test_both_fronts_speak_tls_and_nothing_else(authority, server):
    async def use(http: int, rpc: int) -> None:
        trust = ssl.create_default_context(cafile=authority.pem)
        async with httpx.AsyncClient(verify=trust) as client:
            assert (await client.get(f"https://127.0.0.1:{http}/health")).status_code == 200
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{http}/health")
        assert await models(rpc, authority.pem.read_bytes()) == ["owner/tiny"]

    serve(server, use)


def test_commands_believe_the_certificate_they_are_given(authority, server):
    async def use(http: int, rpc: int) -> None:
        url, ca = f"https://127.0.0.1:{http}", str(authority.pem)
        assert await asyncio.to_thread(Remote(url, ca=ca).ask, "/status") == {"groups": 2}
        with pytest.raises(PreflightError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(Remote(url).ask, "/status")
        config = BenchConfig(url=url)
        async with connect(config, RealClock(), Access(ca=ca)) as client:
            await client.find_model()
            assert client.model == "owner/tiny"

    serve(server, use)


def test_clients_can_be_asked_for_a_certificate(authority, server):
    cert, key = authority.issue("client")

    async def use(http: int, rpc: int) -> None:
        url, ca = f"https://127.0.0.1:{http}/health", authority.pem.read_bytes()
        trust = ssl.create_default_context(cafile=authority.pem)
        async with httpx.AsyncClient(verify=trust) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(url)
        trust.load_cert_chain(cert, key)
        async with httpx.AsyncClient(verify=trust) as client:
            assert (await client.get(url)).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await models(rpc, ca)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await models(rpc, ca, (key.read_bytes(), cert.read_bytes())) == ["owner/tiny"]

    serve(server, use, str(authority.pem))


def test_the_banner_says_https_and_asks_for_a_key():
    words = ("router.tls_cert=a", "router.tls_key=b", "router.api_keys=[hush]")
    text = banner(presets.read("cpu", words), 8000, None)
    assert "on https://127.0.0.1:8000" in text
    assert "authorization: Bearer KEY" in text
    assert 'api_key="KEY"' in text
    assert "hush" not in text
    assert "authorization" not in banner(presets.read("cpu", ()), 8000, None)
