"""What a client hears of a failure behind the front door: plain words and the id of its request.

Ranks fail in words full of what is theirs: names, addresses, rooms, files. Those go to the log,
with the same id. The one exception is a pair of ranks whose KV differs: clients see what differs.
"""

from __future__ import annotations

from core.errors import (
    AntiphonError,
    EngineError,
    Overloaded,
    RequestError,
    Unavailable,
)
from core.wire import KV_DIFFERS, ErrorKind, StreamError

INTERNAL = "internal error: the server's log says more"
_REFUSED = "a worker refused the request"
_FULL = "the workers are full: come again later"
_LOST = "no worker could finish the request"
_NO_WORDS = "the token stream ended with an error and no words for it"


def stream_error(error: StreamError | None) -> AntiphonError:
    """The exception for the error that ended a token stream; what the rank said is its detail."""
    if error is None:
        return _with_detail(EngineError(INTERNAL), _NO_WORDS)
    match error.kind:
        case ErrorKind.INVALID:
            return _with_detail(RequestError(_REFUSED), error.message)
        case ErrorKind.OVERLOADED:
            return _with_detail(Overloaded(_FULL), error.message)
        case ErrorKind.UNAVAILABLE:
            return _with_detail(Unavailable(plain(error.message, _LOST)), error.message)
        case ErrorKind.INTERNAL:
            return _with_detail(EngineError(INTERNAL), error.message)


def plain(detail: str, instead: str) -> str:
    """``instead``, and how prefill and decode rank differ where that is what ``detail`` says."""
    start = detail.find(KV_DIFFERS)
    return instead if start < 0 else f"{instead}: {detail[start:]}"


def told(error: Exception, rid: str) -> AntiphonError:
    """The error as its caller may see it, with the id under which the log says more."""
    match error:
        case RequestError() | Overloaded() if not error.detail:
            return error  # of the front door itself, in its caller's words
        case RequestError():
            made: AntiphonError = RequestError(_named(error, rid))
        case Overloaded(retry_after_s=wait_s):
            made = Overloaded(_named(error, rid), retry_after_s=wait_s)
        case Unavailable():
            made = Unavailable(_named(error, rid))
        case _:
            made = EngineError(_named(INTERNAL, rid))
    return _with_detail(made, detail_of(error))


def detail_of(error: Exception) -> str:
    """What the log shall say."""
    return (error.detail if isinstance(error, AntiphonError) else "") or str(error)


def _named(words: object, rid: str) -> str:
    return f"{words} (request id {rid})"


def _with_detail(error: AntiphonError, detail: str) -> AntiphonError:
    error.detail = detail
    return error
