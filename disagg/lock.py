"""Methods that hold their object's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class _Lockable(Protocol):
    _lock: threading.RLock


Owner = TypeVar("Owner", bound=_Lockable)
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Method = Callable[Concatenate[Owner, Arguments], Answer]


def locked(method: Method[Owner, Arguments, Answer]) -> Method[Owner, Arguments, Answer]:
    """Run the method under ``self._lock``, which may be held already by the same thread."""

    @wraps(method)
    def held(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        with self._lock:
            return method(self, *args, **kwargs)

    return held
