"""Nothing is read of a request, and no route is looked for, before its key has been seen."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import Forbidden, Unauthorized
from router.keys import Keys
from router.openai.errors import error_response

OPEN = frozenset({"/health", "/ready", "/version", "/metrics"})  # for probes and scrapers
ADMIN = "/admin"


class Guard:
    """ASGI middleware: 401 and 403, and ``request.state.caller`` for the routes."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["caller"] = self._caller(scope)
            except (Unauthorized, Forbidden) as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> str:
        path = scope["path"]
        if path in OPEN:
            return ""
        shown = _authorization(scope)
        if path == ADMIN or path.startswith(f"{ADMIN}/"):
            self._keys.operator(shown)
            return ""
        return self._keys.caller(shown)


def _authorization(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value).decode("latin-1")
    return None
