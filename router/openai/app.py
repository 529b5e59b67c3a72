"""The HTTP front: FastAPI routes over a FrontDoor.

Health, readiness and status come from callables, so this folder knows nothing of clusters.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from core.metrics import CONTENT_TYPE
from router.frontdoor import FrontDoor
from router.keys import Keys
from router.openai import answers, convert
from router.openai.body_limit import BodyLimit
from router.openai.errors import error_body, install_error_handlers, json_response
from router.openai.guard import Guard
from router.openai.request_id import RequestId, named
from router.openai.schema import ChatBody, CompletionBody, GenerationBody, refuse_unsupported
from router.openai.sse import EventStream, sse, while_connected
from router.readiness import Readiness
from router.text.request import TextEvent, TextRequest

_CLIENT_GONE = 499  # nobody reads it; the access log does


class HttpServices(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP front asks of the rest of the system."""

    door: FrontDoor
    ready: Callable[[], Awaitable[Readiness]]
    status: Callable[[], Awaitable[dict[str, Any]]]  # opaque: the JSON of GET /status
    metrics: Callable[[], bytes]  # the page of GET /metrics
    version: str
    body_limit_mib: int = 16
    keys: Keys = msgspec.field(default_factory=Keys)


def make_app(services: HttpServices) -> FastAPI:
    """The application; a server of its own (uvicorn) runs it."""
    app = FastAPI(title="antiphon", version=services.version)
    app.add_middleware(BodyLimit, limit_mib=services.body_limit_mib)
    app.add_middleware(Guard, keys=services.keys)
    app.add_middleware(RequestId)  # the outermost: added last
    install_error_handlers(app)
    _add_generation(app, services.door)
    _add_models(app, services.door)
    _add_operations(app, services)
    return app


def _add_generation(app: FastAPI, door: FrontDoor) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        _check(door, body)
        asked = convert.chat_request(body, request.state.caller, door.model.sampling)
        name = body.model or door.model.name
        answer = answers.ChatAnswer(asked, name, int(door.clock.epoch()))
        return await _generate(door, asked, answer, body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        _check(door, body)
        asked = convert.completion_request(body, request.state.caller, door.model.sampling)
        name = body.model or door.model.name
        answer = answers.CompletionAnswer(body, asked, name, int(door.clock.epoch()))
        return await _generate(door, asked, answer, body, request)


def _check(door: FrontDoor, body: GenerationBody) -> None:
    if body.model:
        door.model.check_name(body.model)
    refuse_unsupported(body)


async def _generate(
    door: FrontDoor,
    asked: TextRequest,
    answer: answers.Answer,
    body: GenerationBody,
    request: Request,
) -> Response:
    asked = msgspec.structs.replace(
        asked,
        trace=request.headers.get("traceparent", ""),
        client_id=request.state.client_id or "",
    )
    named(request, asked.rid)
    if body.stream:
        return EventStream(_stream(door, asked, answer, body))
    whole = await while_connected(request.receive, _collect(door, asked, answer))
    return Response(status_code=_CLIENT_GONE) if whole is None else json_response(whole)


async def _collect(door: FrontDoor, asked: TextRequest, answer: answers.Answer) -> answers.Json:
    events: list[TextEvent] = []
    async with door.open(asked) as stream:
        async for step in stream:
            events.extend(step)
    return answer.whole(events, stream.usage)


async def _stream(
    door: FrontDoor, asked: TextRequest, answer: answers.Answer, body: GenerationBody
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer; what became known together is one item."""
    options = body.stream_options
    wants_usage = options is not None and options.include_usage
    always = options is not None and options.continuous_usage_stats
    async with door.open(asked) as stream, aclosing(stream):
        async for step in stream:
            chunks = [chunk for event in step for chunk in answer.chunks(event)]
            if always or wants_usage:
                usage = answers.usage_body(stream.usage) if always else None
                for chunk in chunks:
                    chunk["usage"] = usage
            yield b"".join(map(sse, chunks))
        if wants_usage:
            yield sse(answer.usage_chunk(stream.usage))


def _add_models(app: FastAPI, door: FrontDoor) -> None:
    def card(name: str) -> dict[str, Any]:
        model = door.model
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "antiphon",
            "root": model.name,
            "max_model_len": model.context_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(name) for name in door.model.names]})

    @app.get("/v1/models/{name:path}")  # names may have a slash: owner/model
    async def model(name: str) -> Response:
        door.model.check_name(name)
        return json_response(card(name))


def _add_operations(app: FastAPI, services: HttpServices) -> None:
    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        now = await services.ready()
        if now.ready:
            return json_response({"status": "ready"})
        body = error_body(503, f"not ready: {now.told}", code="not_ready")
        return json_response({"status": "not ready", "reason": now.told, **body}, 503)

    @app.get("/status")
    async def status() -> Response:
        return json_response(await services.status())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(services.metrics(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": services.version})
