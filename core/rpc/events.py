"""What the RPC server tells the step loop, and the face the step loop shows to it.

Events are posted from the server's event loop and handled in the step thread, in order. The way
back (reports, peer messages) is ``RankServer.deliver`` and ``RankServer.deliver_peer``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.dump import QueueView, RankDump
from core.lease import Health
from core.wire import RankInfo, RankStatus, TokenRequest


@dataclass(frozen=True, slots=True)
class Submitted:
    """A router starts a request."""

    router: str
    request: TokenRequest


@dataclass(frozen=True, slots=True)
class Aborted:
    """A router no longer wants the request with exactly this id; it may be unknown or over."""

    router: str
    rid: str
    done: bool = False  # the router has all that it wants of it


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A router's session ended and it did not come back: abort all its requests."""

    router: str


@dataclass(frozen=True, slots=True)
class Pinged:
    """A router asks for a StepReport now, with no chunks if there are none."""

    router: str


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """Bytes from another rank. ``peer`` names one life of the link, not the rank."""

    peer: str
    data: bytes


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A link ended: nothing more comes from this id, and nothing can be sent to it."""

    peer: str


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """Someone wants a RankStatus. ``reply`` may be called from any thread and never blocks."""

    reply: Callable[[RankStatus], None]


@dataclass(frozen=True, slots=True)
class QueuesAsked:
    """Someone wants a QueueView. ``reply`` is like that of StatusAsked."""

    reply: Callable[[QueueView], None]


RankEvent = (
    Submitted | Aborted | RouterLost | Pinged | PeerMessage | PeerLost | StatusAsked | QueuesAsked
)


class StepPort(Protocol):
    """A step loop, as the server sees it."""

    @property
    def info(self) -> RankInfo:
        """Fixed from the moment the server starts."""
        ...

    def post(self, event: RankEvent) -> None:
        """Queue an event for the step thread. Called from another thread; must not block."""
        ...

    def health(self) -> Health:
        """How the step loop is, from any thread. Cheap."""
        ...

    def glance(self) -> RankDump:
        """What can be seen from any thread, also while a step hangs: all but the queues."""
        ...
