"""Both fronts over TLS, with and without certificates of clients, and commands that ask them."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import httpx
import pytest

from antiphon.remote import Remote
from bench.client import Access, Client, connect
from bench.config import BenchConfig
from cluster.fronts import banner, listen
from cluster.join import join
from core import presets
from core.clock import RealClock
from core.config import RouterConfig
from core.errors import PreflightError
from router.keys import Keys
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


async def asked(command: str, url: str) -> str:
    """What a command says that cannot reach ``url``, and whom it does not believe."""
    try:
        if command == "bench":
            async with connect(BenchConfig(url=url), RealClock(), Access()) as client:
                await client.find_model()
        elif command == "router":
            words = ("router.port=0", "router.grpc_port=0")
            await join(presets.read("cpu", words), url, lambda _: None)
        else:
            await asyncio.to_thread(Remote(url).ask, "/status")
    except PreflightError as error:
        return str(error)
    raise AssertionError("it was reached")


@pytest.mark.parametrize("command", ["status", "bench", "router"])
def test_commands_that_talk_past_tls_say_what_to_try(command, server):
    async def use(http: int, _: int) -> None:
        assert "with --ca FILE" in await asked(command, f"https://127.0.0.1:{http}")
        advised = await asked(command, f"http://127.0.0.1:{http}")
        assert f"try https://127.0.0.1:{http}" in advised

    serve(server, use)


def test_a_key_that_is_asked_for_is_named_by_bench_too():
    async def main() -> None:
        keys = Keys(("secret",), "")
        app = make_app(services(make_door(FakeStreams(says("ok"))), keys=keys))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            client = Client(http, BenchConfig(url="http://test"), RealClock())
            with pytest.raises(PreflightError) as caught:
                await client.find_model()
        assert str(caught.value).endswith("here: --key KEY, or the variable ANTIPHON_KEY")
        assert "http" not in str(caught.value).removeprefix("http://test/v1/models")

    run_tidy(main)


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


def test_a_certificate_that_signed_itself_is_what_the_banner_names(authority, server):
    def text(cert: Path, key: Path) -> str:
        words = (f"router.tls_cert={cert}", f"router.tls_key={key}")
        return banner(presets.read("cpu", words), 8000, None)

    own = text(authority.pem, authority.key)
    assert f"curl --cacert {authority.pem} https" in own
    assert f"--ca {authority.pem}\n" in own
    assert "CA.pem:" not in own
    assert "--cacert CA.pem" in text(*server)


def test_the_banner_says_https_and_asks_for_a_key():
    words = ("router.tls_cert=a", "router.tls_key=b", "router.api_keys=[hush]")
    text = banner(presets.read("cpu", words), 8000, None)
    assert "on https://127.0.0.1:8000" in text
    assert "authorization: Bearer KEY" in text
    assert 'api_key="KEY"' in text
    assert "hush" not in text
    assert "curl --cacert CA.pem -H 'authorization: Bearer KEY' https" in text
    assert "antiphon status --url https://127.0.0.1:8000 --ca CA.pem --key KEY" in text
    assert "CA.pem: the certificate of whoever signed a;" in text
    assert "authorization" not in banner(presets.read("cpu", ()), 8000, None)
