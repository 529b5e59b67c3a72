"""The parts of one router, put together: sessions, policy, front door, fronts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI

from cluster.dump import DumpBoard
from cluster.status import StatusBoard
from core.clock import RealClock
from core.config import RouterConfig, TracingConfig
from core.metrics import PrometheusSink
from core.rpc.client import Connector, SessionPace
from core.tracing.tracer import Tracer, open_tracer
from router.admin import add_dump
from router.admission import Admission
from router.dispatch import Dispatcher, DispatchLimits, Routes
from router.encoder import Encoder
from router.frontdoor import FrontDoor
from router.keys import read_keys
from router.openai.app import HttpServices, make_app
from router.policy.base import POLICIES, PolicyContext
from router.replicas import Replicas
from router.rpc.server import RpcFront, RpcServices
from router.selftest import SelfTest
from router.text.chat import open_template
from router.text.request import ServedModel, Terms
from router.text.tokenizer import TOKENIZERS


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of a router that ``serve`` runs."""

    app: FastAPI
    door: FrontDoor
    rpc: RpcFront | None  # None: switched off
    replicas: Replicas
    selftest: SelfTest
    status: StatusBoard


@asynccontextmanager
async def router(
    settings: RouterConfig, model: ServedModel, folder: Path, tracing: TracingConfig | None = None
) -> AsyncIterator[Router]:
    """The front door over sessions that follow ``Replicas.update``.

    ``folder`` has the model's tokenizer and chat template.
    """
    clock, sink, keys = RealClock(), PrometheusSink(), read_keys(settings)
    tracer = None if tracing is None else open_tracer(tracing, "router", clock)
    connector = Connector(secrets.token_hex(8), SessionPace.within(settings.rank_timeout_s))
    replicas = Replicas(connector)
    context = PolicyContext(settings.cache_aware, clock, sink)
    policies = POLICIES.load(settings.policy)(context)
    limits = DispatchLimits(reroute_wait_s=settings.reroute_wait_s)
    dispatcher = Dispatcher(
        replicas, policies.prefill, policies.decode, limits=limits, sink=sink, tracer=tracer
    )
    door = FrontDoor(
        dispatcher,
        Encoder(TOKENIZERS.load(settings.tokenizer)(folder), open_template(folder, clock), model),
        admission=Admission(settings.queue_limit, clock),
        sink=sink,
        clock=clock,
        terms=_terms(settings),
        tracer=tracer,
    )

    def through(routes: Routes) -> Dispatcher:
        turns = POLICIES.load("round_robin")(context)
        once = DispatchLimits(reroute_wait_s=limits.reroute_wait_s, max_reroutes=0)
        return Dispatcher(routes, turns.prefill, turns.decode, limits=once)

    # without reroutes: one that each time brought a token before it failed would pass
    selftest = SelfTest(replicas, through(replicas), through)
    board = StatusBoard(model.name, replicas, selftest, sink)
    services = HttpServices(
        door=door,
        ready=selftest.ready,
        status=board.status,
        metrics=board.metrics,
        version=version("antiphon"),
        body_limit_mib=settings.body_limit_mib,
        keys=keys,
    )
    rpc_services = RpcServices(
        door=door,
        ready=selftest.ready,
        members=replicas.members,
        body_limit_mib=settings.body_limit_mib,
        keys=keys,
    )
    rpc = RpcFront(rpc_services) if settings.grpc else None
    app = make_app(services)
    add_dump(app, DumpBoard(dispatcher.live, replicas).dump)
    try:
        yield Router(app, door, rpc, replicas, selftest, board)
    finally:
        await replicas.close()
        await _close(tracer)


def _terms(settings: RouterConfig) -> Terms:
    return Terms(
        max_output_tokens=settings.max_output_tokens,
        max_choices=settings.max_choices,
        request_timeout_s=settings.request_timeout_s,
        salt_by_key=settings.salt_by_key,
    )


async def _close(tracer: Tracer | None) -> None:
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
