"""A front door over fake token streams and the byte tokenizer, and HTTP on top of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from core.clock import VirtualClock
from core.metrics import PrometheusSink
from core.tracing.tracer import Tracer
from router.admission import Admission
from router.encoder import Encoder
from router.frontdoor import FrontDoor
from router.keys import Keys
from router.openai.app import HttpServices, make_app
from router.readiness import Readiness
from router.text.chat import ChatTemplate
from router.text.request import NEUTRAL, SamplingDefaults, ServedModel, Terms
from router.text.tokenizer import BytesTokenizer
from tests.support.fake_streams import FakeStreams

OPEN = Keys()
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def make_door(
    streams: FakeStreams,
    *,
    template: str | None = TEMPLATE,
    aliases: tuple[str, ...] = (),
    context_len: int = 1000,
    limit: int = 64,
    sampling: SamplingDefaults = NEUTRAL,
    sink: PrometheusSink | None = None,
    tracer: Tracer | None = None,
    **terms: Any,
) -> FrontDoor:
    clock = VirtualClock(start=5.0)
    return FrontDoor(
        streams,
        Encoder(
            BytesTokenizer(),
            None if template is None else ChatTemplate(template, {}, clock, name="test"),
            ServedModel(
                name="owner/tiny",
                aliases=aliases,
                context_len=context_len,
                vocab_size=258,
                eos_token_ids=frozenset({257}),
                sampling=sampling,
            ),
        ),
        admission=Admission(limit, clock),
        sink=sink or PrometheusSink(),
        clock=clock,
        terms=Terms(**terms),
        draw_seed=lambda: 1000,
        tracer=tracer,
    )


async def _ready() -> Readiness:
    return Readiness(ready=True)


async def _status() -> dict[str, Any]:
    return {"groups": 2}


def services(
    door: FrontDoor,
    *,
    ready: Callable[[], Awaitable[Readiness]] = _ready,
    sink: PrometheusSink | None = None,
    body_limit_mib: int = 1,
    keys: Keys = OPEN,
) -> HttpServices:
    page = (sink or PrometheusSink()).render
    return HttpServices(
        door=door,
        ready=ready,
        status=_status,
        metrics=page,
        version="1.2.3",
        body_limit_mib=body_limit_mib,
        keys=keys,
    )


def http_client(wiring: HttpServices) -> httpx.AsyncClient:
    """A client whose server is in this process; the server's defects become 500, as in life."""
    transport = httpx.ASGITransport(make_app(wiring), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")
