"""Errors -> HTTP status and OpenAI's error body, for every way a request can fail."""

from __future__ import annotations

import logging
import math
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from core.errors import (
    AntiphonError,
    Forbidden,
    ModelNotFound,
    Overloaded,
    RequestError,
    Unauthorized,
    Unavailable,
)
from router.echo import clipped
from router.openai.request_id import header_of

_log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# The first that fits: status, and the code where the error has none of its own.
_KNOWN: tuple[tuple[type[AntiphonError], int, str | None], ...] = (
    (Unauthorized, 401, "invalid_api_key"),
    (Forbidden, 403, "forbidden"),
    (ModelNotFound, 404, "model_not_found"),
    (RequestError, 400, None),
    (Overloaded, 429, "overloaded"),
    (Unavailable, 503, "unavailable"),
    (AntiphonError, 500, "internal_error"),
)
_INTERNAL = "internal error: the server's log says more"


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The nested envelope that OpenAI clients read."""
    message = message.encode("utf-8", "backslashreplace").decode()  # it may quote the caller
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers for an error. One place decides for streams and plain answers."""
    if not isinstance(error, AntiphonError):
        return 500, error_body(500, _INTERNAL, code="internal_error"), {}
    status, code = next((status, code) for kind, status, code in _KNOWN if isinstance(error, kind))
    param = None
    if isinstance(error, RequestError):
        param = "model" if isinstance(error, ModelNotFound) else error.param
        code = code or error.code
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return status, error_body(status, str(error), param=param, code=code), headers


def error_response(error: Exception) -> Response:
    """The whole HTTP answer for an error."""
    status, body, headers = describe(error)
    return json_response(body, status, headers)


def json_response(
    body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON answer, encoded by orjson."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failure of ``app`` with the envelope, unknown routes and methods too."""
    app.add_exception_handler(AntiphonError, _on_known)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_unknown)


async def _on_known(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_unknown(request: Request, error: Exception) -> Response:
    _log.error("request to %s failed", request.url.path, exc_info=error)
    answer = error_response(error)
    answer.headers.update(header_of(request.scope))  # beyond every middleware
    return answer


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, message = error.status_code, str(error.detail)
    if status == 404:
        message = f"no such route: {request.method} {clipped(request.url.path)}"
    elif status == 405:
        message = f"{clipped(request.url.path)} does not take {request.method}"
    headers = dict(error.headers) if error.headers else None
    return json_response(error_body(status, message), status, headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    """Validation failed: 400 with the path of the first field at fault."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]  # without "body"
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return json_response(error_body(400, f"the body is not valid JSON: {reason}"), 400)
    if not where:
        message = "the body must be a JSON object, with Content-Type: application/json"
        return json_response(error_body(400, message), 400)
    reason = first["msg"].removeprefix("Value error, ")
    message = f"{clipped('.'.join(where))}: {reason}"
    return json_response(error_body(400, message, param=where[0]), 400)
