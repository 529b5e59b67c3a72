"""TLS on both fronts, API keys, an admin key and tenants of the cache, on one real server."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import openai
import pytest

from router.rpc.gen import antiphon_pb2 as pb, antiphon_pb2_grpc
from tests.support.certificates import Authority
from tests.support.served import ANTIPHON, Served, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-the-operator"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}


@dataclass(frozen=True)
class Secured:
    """A server and what a client needs to reach it."""

    served: Served
    authority: Authority

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority.pem)

    def openai(self, key: str) -> openai.OpenAI:
        http = httpx.Client(verify=self.trust, trust_env=False)
        url = f"{self.served.url}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)

    def ask(self, method: str, path: str, key: str = "", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(verify=self.trust, trust_env=False, headers=headers) as http:
            return http.request(method, f"{self.served.url}{path}", timeout=30, **body)

    def generate(self, channel: grpc.Channel, key: str = "") -> list[Any]:
        """Every message of one Generate call."""
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        options = pb.GenerationOptions(max_tokens=3, ignore_eos=True)
        request = pb.GenerateRequest(text="Once upon a time", options=options)
        stub = antiphon_pb2_grpc.AntiphonStub(channel)
        return list(stub.Generate(request, metadata=metadata, timeout=30))

    def secure_channel(self) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(self.authority.pem.read_bytes())
        return grpc.secure_channel(self.served.rpc, credentials)

    def command(self, *words: str, key: str) -> subprocess.CompletedProcess[str]:
        access = ("--url", self.served.url, "--ca", str(self.authority.pem), "--key", key)
        return subprocess.run(
            [ANTIPHON, *words, *access], capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    cert, key = authority.issue("server")
    (folder / "keys").write_text(f"{ALICE}\n{BOB}\n")
    (folder / "admin").write_text(ADMIN)
    words = (
        "cpu", "--model", "tiny-moe", "cluster.runtime=process",
        f"router.tls_cert={cert}", f"router.tls_key={key}",
        f"router.api_keys=[file:{folder / 'keys'}]", f"router.admin_key=file:{folder / 'admin'}",
    )  # fmt: skip
    with serving(*words) as served:
        yield Secured(served, authority)
    assert not [k for k in (ALICE, BOB, ADMIN) if k in served.log], "a key was logged"


def test_the_openai_client_is_answered_over_tls_with_a_key(secured):
    assert secured.served.url.startswith("https://")
    with secured.openai(ALICE) as client:
        whole = client.chat.completions.create(model="tiny-moe", **CHAT)
        streamed = list(client.chat.completions.create(model="tiny-moe", stream=True, **CHAT))
    assert whole.usage.completion_tokens >= 1
    assert streamed[-1].choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("key", ["", "wrong", ALICE[:-1]])
def test_no_key_and_a_wrong_key_get_the_error_that_openai_clients_know(secured, key):
    answer = secured.ask("POST", "/v1/chat/completions", key, json={"model": "tiny-moe", **CHAT})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    with secured.openai(key or "none") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_operations_take_the_admin_key_alone(secured):
    scale = {"json": {"replicas": {"decode": 1}}}
    for method, path, body in (("POST", "/admin/scale", scale), ("GET", "/admin/dump", {})):
        assert secured.ask(method, path, **body).status_code == 401
        refused = secured.ask(method, path, ALICE, **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert secured.ask(method, path, ADMIN, **body).status_code == 200


def test_commands_take_the_key_and_the_certificate(secured):
    assert secured.command("status", key=BOB).stdout.startswith("tiny-moe: ready")
    assert secured.command("scale", "decode=1", key=ADMIN).returncode == 0
    refused = secured.command("scale", "decode=1", key=BOB)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "admin key" in refused.stderr


def test_grpc_speaks_tls_and_wants_the_key_too(secured):
    with secured.secure_channel() as channel:
        *_, last = secured.generate(channel, ALICE)
        assert last.choices[0].finish_reason == pb.FINISH_REASON_LENGTH
        for key in ("", "wrong"):
            with pytest.raises(grpc.RpcError) as refused:
                secured.generate(channel, key)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_nothing_is_answered_in_the_clear(secured):
    plain = secured.served.url.replace("https://", "http://")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{plain}/health", timeout=10, trust_env=False)
    with grpc.insecure_channel(secured.served.rpc) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            secured.generate(channel, ALICE)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_tenant_does_not_find_what_another_has_cached(secured):
    prompt = [100 + 7 * i % 3000 for i in range(400)]

    def cached(key: str, salt: str) -> int:
        with secured.openai(key) as client:
            answer = client.completions.create(
                model="tiny-moe",
                prompt=prompt,
                max_tokens=2,
                extra_body={"cache_salt": salt},
            )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(ALICE, "alice") == 0
    assert cached(BOB, "bob") == 0, "it found the other tenant's prefix"
    assert cached(ALICE, "alice") >= 390
    assert cached(BOB, "bob") >= 390
