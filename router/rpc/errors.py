"""Errors -> gRPC status with google.rpc details, for every way a call can fail."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from core.errors import (
    AntiphonError,
    Forbidden,
    ModelNotFound,
    Overloaded,
    RequestError,
    Unauthorized,
    Unavailable,
)
from router.rpc.gen import antiphon_pb2 as pb

DOMAIN = "antiphon"  # of the reasons in ErrorInfo
ID_IN_USE = "request_id_in_use"  # code of the RequestError for it

# The first that fits: status, and the reason where the error has no code of its own.
_KNOWN: tuple[tuple[type[AntiphonError], Any, str], ...] = (  # opaque: grpc.StatusCode
    (Unauthorized, grpc.StatusCode.UNAUTHENTICATED, "INVALID_API_KEY"),
    (Forbidden, grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN"),
    (ModelNotFound, grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    (Unavailable, grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    (AntiphonError, grpc.StatusCode.INTERNAL, "INTERNAL_ERROR"),
)
_INTERNAL = "internal error: the server's log says more"
# A status travels in HTTP/2 trailers, and many peers take no more than 8 KiB of those. The message
# is in there up to three times, once percent-encoded.
_MESSAGE_BYTES = 1000

log = logging.getLogger(__name__)


class Context(Protocol):
    """One call as the handlers see it (grpc.aio.ServicerContext)."""

    async def write(self, message: Any, /) -> None:  # opaque: a protobuf message
        ...

    async def abort(
        self, code: Any, details: str, trailing_metadata: Any = ...
    ) -> NoReturn:  # opaque: grpc.StatusCode, metadata pairs
        ...

    def time_remaining(self) -> float | None: ...

    def invocation_metadata(self) -> Any:  # opaque: pairs of name and value
        ...


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """End the call with the status of whatever the block raises."""
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise  # the call has its status; or its caller has left, which grpc.aio passes over
    except AntiphonError as error:
        if code_of(error) is grpc.StatusCode.INTERNAL:
            log.warning("a call ended with an error: %s", error)
        await _abort(context, error)
    except Exception as error:
        log.error("a call failed", exc_info=error)
        await _abort(context, AntiphonError(_INTERNAL))
        raise


def code_of(error: AntiphonError) -> Any:  # opaque: grpc.StatusCode
    """The status code for an error."""
    if isinstance(error, RequestError) and error.code == ID_IN_USE:
        return grpc.StatusCode.ALREADY_EXISTS
    return next(code for kind, code, _ in _KNOWN if isinstance(error, kind))


async def _abort(context: Context, error: AntiphonError) -> NoReturn:
    status = rpc_status.to_status(describe(error))
    retry = (
        (("retry-after", str(math.ceil(error.retry_after_s))),)
        if isinstance(error, Overloaded)
        else ()
    )
    await context.abort(status.code, status.details, (*status.trailing_metadata, *retry))


def describe(error: AntiphonError) -> status_pb2.Status:
    """The status and its details: the reason, the field at fault, when to come back."""
    message = _shortened(str(error))
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN))
    if isinstance(error, RequestError) and error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_path(error.param), description=message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded):
        delay = Duration()
        delay.FromMilliseconds(math.ceil(1000 * error.retry_after_s))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _reason(error: AntiphonError) -> str:
    """A word for programs, e.g. CONTEXT_LENGTH_EXCEEDED."""
    if isinstance(error, RequestError) and error.code is not None:
        return error.code.upper()
    return next(reason for kind, _, reason in _KNOWN if isinstance(error, kind))


def _path(param: str) -> str:
    """The path of a field from the root of the request."""
    return f"options.{param}" if param in pb.GenerationOptions.DESCRIPTOR.fields_by_name else param


def _shortened(message: str) -> str:
    """It may quote the caller, and then be of any length."""
    data = message.encode("utf-8", "backslashreplace")
    if len(data) <= _MESSAGE_BYTES:
        return data.decode()
    return data[:_MESSAGE_BYTES].decode("utf-8", "ignore") + "..."
