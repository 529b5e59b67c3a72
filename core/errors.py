"""Every exception that crosses a folder.

AntiphonError
├── OperatorError          the operator can act; the command line exits with code 2
│   ├── ConfigError        a wrong key, type or value, with its path
│   ├── UnknownBackend     a name no registry knows
│   ├── BackendUnavailable a library or tool is missing
│   ├── ModelError         a model folder that cannot be served
│   └── PreflightError     a port, library or memory is missing
├── RequestError           the caller can act: 400
├── Unauthorized           the caller has no key, or a wrong one: 401
├── Forbidden              the caller's key does not open this: 403
├── ModelNotFound          the caller named a model that is not served: 404
├── Overloaded             the caller can come back later: 429, Retry-After
├── Unavailable            no worker can take it now: 503
├── RankLost               a rank's session ended; the dispatcher routes again
├── TransferError          a KV transfer failed; the handoff decides
└── EngineError            our own defect, reported with a reason: 500
"""

from __future__ import annotations


class AntiphonError(Exception):
    """Base of all errors that cross a folder. The message names the fix."""

    detail = ""  # what the log says of it where the message is for other eyes


class OperatorError(AntiphonError):
    """Something the person at the keyboard can mend before serving starts."""


class ConfigError(OperatorError):
    """The configuration is wrong; the message starts with the path of the key."""


class UnknownBackend(OperatorError):
    """A configuration word that no registry knows."""

    def __init__(self, kind: str, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"unknown {kind} {name!r}: choose one of {', '.join(sorted(known))}")


class BackendUnavailable(OperatorError):
    """A known backend that lacks a library or a tool."""

    def __init__(self, kind: str, name: str, missing: tuple[str, ...]) -> None:
        super().__init__(
            f"{kind} {name!r} needs {', '.join(missing)}: install it, or choose another"
        )


class ModelError(OperatorError):
    """A model folder or name that cannot be served."""


class PreflightError(OperatorError):
    """The machine lacks something; the message says what to do."""


class RequestError(AntiphonError):
    """The request can never work as it stands.

    ``param`` names the field at fault; ``code`` is a word for programs, as OpenAI's API has them.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFound(RequestError):
    """The named model is not served here."""


class Unauthorized(AntiphonError):
    """The caller must show a key that is known here."""


class Forbidden(AntiphonError):
    """Whoever the caller is, this is not open to them."""


class Overloaded(AntiphonError):
    """Back-pressure: the caller may come again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(AntiphonError):
    """No worker can take the request now."""


class RankLost(AntiphonError):
    """The session to a rank ended before the stream did."""


class TransferError(AntiphonError):
    """A KV transfer failed. Source and target pages stay held until the peer is quiet."""


class EngineError(AntiphonError):
    """A defect of ours, with what is known of it."""
