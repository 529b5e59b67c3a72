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

from core.errors import AntiphonError, ModelNotFound, Overloaded, RequestError, Unavailable

_log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
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
    message = str(error)
    match error:
        case ModelNotFound():
            return 404, error_body(404, message, param="model", code="model_not_found"), {}
        case RequestError():
            return 400, error_body(400, message, param=error.param, code=error.code), {}
        case Overloaded():
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
            return 429, error_body(429, message, code="overloaded"), headers
        case Unavailable():
            return 503, error_body(503, message, code="unavailable"), {}
        case AntiphonError():
            return 500, error_body(500, message, code="internal_error"), {}
        case _:
            return 500, error_body(500, _INTERNAL, code="internal_error"), {}


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
    return error_response(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, message = error.status_code, str(error.detail)
    if status == 404:
        message = f"no such route: {request.method} {request.url.path}"
    elif status == 405:
        message = f"{request.url.path} does not take {request.method}"
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
    return json_response(error_body(400, f"{'.'.join(where)}: {reason}", param=where[0]), 400)
