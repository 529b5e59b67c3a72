"""Operations over HTTP: scale a group, drain a rank, list the members for another router, dump."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from core.errors import RequestError
from router.echo import clipped
from router.openai.errors import json_response


class Operations(msgspec.Struct, frozen=True, kw_only=True):
    """What the admin endpoints ask of whoever runs the cluster. All raise RequestError."""

    scale: Callable[[Mapping[str, int]], dict[str, int]]  # group -> replicas; all that is wanted
    drain: Callable[[str], None]  # the rank's name, "decode/0/0"
    members: Callable[[], dict[str, Any]]  # opaque: JSON for a router that joins


class ScaleBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /admin/scale: replicas by group."""

    replicas: dict[str, int]


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /admin/drain."""

    rank: str


def add_operations(app: FastAPI, operations: Operations) -> None:
    """Add the admin endpoints to an app that maps RequestError to 400."""

    @app.post("/admin/scale")
    async def scale(request: Request) -> Response:
        body = await _read(request, ScaleBody)
        return json_response({"replicas": operations.scale(body.replicas)})

    @app.post("/admin/drain")
    async def drain(request: Request) -> Response:
        body = await _read(request, DrainBody)
        operations.drain(body.rank)
        return json_response({"draining": body.rank})

    @app.get("/admin/members")
    async def members() -> Response:
        return json_response(operations.members())


def add_dump(app: FastAPI, dump: Callable[[str | None], Awaitable[dict[str, Any]]]) -> None:
    """Add GET /admin/dump; ``dump`` gets a rank's name, or None for all. May raise RequestError."""

    @app.get("/admin/dump")
    async def show(rank: str | None = None) -> Response:
        return json_response(await dump(rank))


async def _read(request: Request, kind: type[Any]) -> Any:  # opaque: an instance of ``kind``
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # a web page in the operator's browser can send any other type without being asked
        raise RequestError("send the body with Content-Type: application/json")
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.DecodeError as error:
        raise RequestError(f"the body does not fit: {clipped(error)}") from error
