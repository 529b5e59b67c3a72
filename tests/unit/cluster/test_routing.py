"""What the configuration says of keys and limits reaches both fronts of a router."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx
import pytest

from cluster.routing import router
from core.config import RouterConfig
from core.errors import ConfigError
from router.rpc.gen import antiphon_pb2 as pb, antiphon_pb2_grpc
from router.text.request import ServedModel
from tests.support.eventually import run_tidy

MODEL = ServedModel(name="tiny", context_len=100, vocab_size=258)
KEY = {"Authorization": "Bearer key-a"}


def settings(**changes) -> RouterConfig:
    return RouterConfig(tokenizer="bytes", policy="round_robin", **changes)


def test_keys_and_limits_hold_over_http(tmp_path: Path):
    limited = settings(
        grpc=False, api_keys=("key-a",), max_choices=2, max_output_tokens=20, host="0.0.0.0"
    )

    async def main() -> None:
        async with (
            router(limited, MODEL, tmp_path) as parts,
            httpx.AsyncClient(
                transport=httpx.ASGITransport(parts.app), base_url="http://test"
            ) as client,
        ):
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/v1/models", headers=KEY)).status_code == 200
            assert (await client.get("/admin/dump", headers=KEY)).status_code == 403
            for field, value in (("n", 3), ("max_tokens", 21)):
                body = {"prompt": "x", field: value}
                answer = await client.post("/v1/completions", headers=KEY, json=body)
                assert answer.json()["error"]["param"] == field

    run_tidy(main)


def test_keys_hold_over_grpc(tmp_path: Path):
    async def main() -> None:
        async with router(settings(api_keys=("key-a",)), MODEL, tmp_path) as parts:
            assert parts.rpc is not None
            port = parts.rpc.bind("127.0.0.1", 0)
            await parts.rpc.start()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = antiphon_pb2_grpc.AntiphonStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.ListModels(pb.ListModelsRequest())
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                key = (("authorization", "Bearer key-a"),)
                await stub.ListModels(pb.ListModelsRequest(), metadata=key)
            await parts.rpc.stop(0)

    run_tidy(main)


def test_a_key_that_cannot_be_read_makes_no_router(tmp_path: Path):
    async def main() -> None:
        with pytest.raises(ConfigError, match="NOT_SET"):
            async with router(settings(admin_key="env:NOT_SET"), MODEL, tmp_path):
                pass

    run_tidy(main)
