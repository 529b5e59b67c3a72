"""A prefill and a decode rank, whole, and a router over them: one process, KV through memory.

Everything is as on a cluster, gRPC included, but for the transport.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import torch

from cluster.routing import Router, router
from core.config import DisaggConfig, RankSpec, RouterConfig, TracingConfig
from core.handoffs import HandoffReport
from core.wire import RankStatus, Role, SamplingParams, TokenLogprob, Usage
from disagg.transport.inproc import Hub, InprocTransport
from router.dispatch import Dispatcher
from router.policy.least_load import LeastLoad
from router.replicas import Member
from router.text.request import ServedModel
from tests.support.eventually import eventually
from tests.support.real_engine import rank_spec
from worker.architectures import read_spec
from worker.host import OpenTransport, RankHost

OFF = TracingConfig()


@dataclass
class Said:
    """One answer."""

    ids: list[int] = field(default_factory=list)
    usage: Usage | None = None
    scores: list[TokenLogprob] = field(default_factory=list)


@dataclass
class Pair:
    """What ``pd_hosts`` yields."""

    parts: Router
    http: httpx.AsyncClient

    async def tokens(self, prompt: list[int], count: int, **params: object) -> Said:
        """A greedy answer of exactly ``count`` tokens, below the front door."""
        dispatcher = Dispatcher(self.parts.replicas, LeastLoad(), LeastLoad())
        asked = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True, **params)
        said = Said()
        rid = secrets.token_hex(4)
        async with aclosing(dispatcher.stream(rid, prompt, asked)) as chunks:
            async for chunk in chunks:
                assert chunk.error is None, chunk.error
                said.ids += chunk.token_ids
                said.usage = said.usage or chunk.usage
                said.scores += chunk.prompt_logprobs
        return said

    async def post(self, prompt: list[int], count: int) -> httpx.Response:
        """The same over HTTP."""
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return await self.http.post("/v1/completions", json=body)

    async def at_rest(self, timeout_s: float = 10.0) -> None:
        """Return once no rank holds a page or a room; fail after the time-out."""
        async with asyncio.timeout(timeout_s):
            while not all([_rests(await self.status(r)) for r in (Role.PREFILL, Role.DECODE)]):
                pass  # asking takes a while

    async def status(self, role: Role) -> RankStatus:
        (replica,) = self.parts.replicas.routable(role)
        return await replica.client.status()

    async def transfers(self, role: Role) -> HandoffReport:
        report = (await self.status(role)).transfers
        assert report is not None
        return report


@asynccontextmanager
async def pd_hosts(
    folder: Path,
    *,
    decode_dtype: str = "float32",
    page_size: int = 1,
    decode_page_size: int | None = None,
    hub: Hub | None = None,
    transport: OpenTransport | None = None,
    tracing: TracingConfig = OFF,
    **disagg: object,
) -> AsyncIterator[Pair]:
    """Ranks of one model folder; ``disagg`` are fields of DisaggConfig."""
    hub = hub or Hub()
    before = torch.get_num_threads()

    def in_memory(_: RankSpec) -> InprocTransport:
        return InprocTransport(hub)

    async with AsyncExitStack() as stack:
        members = []
        for role, dtype, size in (
            (Role.PREFILL, "float32", page_size),
            (Role.DECODE, decode_dtype, decode_page_size or page_size),
        ):
            spec = msgspec.structs.replace(
                rank_spec(folder, role=role, dtype=dtype, page_size=size),
                disagg=DisaggConfig(**disagg),
                tracing=tracing,
            )
            host = await RankHost.start(
                spec, on_crash=lambda: None, transport=transport or in_memory
            )
            stack.push_async_callback(host.stop)
            members.append(Member(host.info.incarnation, role))
        model = ServedModel(
            name="m",
            context_len=2048,
            vocab_size=read_spec(folder).vocab,
            eos_token_ids=frozenset(),
            created=0,
        )
        settings = RouterConfig(grpc=False, reroute_wait_s=5.0)
        parts = await stack.enter_async_context(router(settings, model, folder, tracing))
        parts.replicas.update(members)
        await eventually(lambda: parts.replicas.complete)
        http = await stack.enter_async_context(
            httpx.AsyncClient(
                transport=httpx.ASGITransport(parts.app), base_url="http://m", timeout=30
            )
        )
        yield Pair(parts, http)
        stack.callback(torch.set_num_threads, before)


def _rests(status: RankStatus) -> bool:
    return status.load.idle and not status.pages.owned and not any(status.handoffs.values())
