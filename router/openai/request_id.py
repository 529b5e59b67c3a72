"""Every answer says which request it is for, errors and streams too: ``x-request-id``."""

from __future__ import annotations

import logging
import re
import uuid

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

HEADER = "x-request-id"

_PLAIN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # no other id of a client's is repeated


class RequestId:
    """ASGI middleware: the id that the client sent, or else one drawn here.

    ``named`` puts the id of a generation in the place of one drawn here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        theirs = _theirs(scope)
        state["client_id"] = theirs
        state["request_id"] = theirs or f"req-{uuid.uuid4().hex}"

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(header_of(scope))
            await send(message)

        await self._app(scope, receive, marked)


def named(request: Request, rid: str) -> None:
    """``request`` is the generation ``rid``: so its answer says, unless the client named it."""
    if request.state.client_id is None:
        request.state.request_id = rid
    else:
        _log.info("its client calls it %s", request.state.client_id, extra={"rid": rid})


def header_of(scope: Scope) -> dict[str, str]:
    """The header, for an answer that does not pass the middleware."""
    return {HEADER: scope["state"]["request_id"]}


def _theirs(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == HEADER.encode():
            text = bytes(value).decode("latin-1")
            return text if _PLAIN.fullmatch(text) else None
    return None
