"""The words of a handoff: what its two state machines hear (events) and ask for (actions)."""

from __future__ import annotations

from dataclasses import dataclass

from core.wire import ErrorKind

# --- events and actions both machines know ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to the peer ended: no message of it will come, and none reaches it."""

    message: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """Our own side gives up, and why."""

    kind: ErrorKind
    message: str


# --- decode side: events ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserved:
    """Pages are set aside."""


@dataclass(frozen=True, slots=True)
class KeptHere:
    """The prompt will be computed on this rank: no page is announced."""


@dataclass(frozen=True, slots=True)
class LastArrived:
    """The peer says that all KV is in place."""

    generation: int
    first_token: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The peer says that all KV is in place, and what is there is not what it sent."""

    generation: int
    message: str


@dataclass(frozen=True, slots=True)
class QuietHeard:
    """The peer says that nothing of its is left to land."""


@dataclass(frozen=True, slots=True)
class RefusedHeard:
    """The peer will not serve the room; ``quiet`` as in messages.Refused."""

    generation: int
    kind: ErrorKind
    message: str
    quiet: bool


@dataclass(frozen=True, slots=True)
class Fenced:
    """The transport was renewed: nothing announced before can land."""


IncomingEvent = (
    Reserved
    | KeptHere
    | LastArrived
    | Corrupt
    | QuietHeard
    | RefusedHeard
    | Fenced
    | PeerLost
    | Aborted
)

# --- decode side: actions ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the peer where to write, under this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class SendDeclined:
    """Tell the peer that its part is not needed."""


@dataclass(frozen=True, slots=True)
class StartDecoding:
    """The pages belong to the sequence."""

    first_token: int


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Ask the peer to stop."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Renew the transport, then tell every room Fenced."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The stream may end now. The pages are still held."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Release:
    """The pages may be used again."""


IncomingAction = Announce | SendDeclined | StartDecoding | SendCancel | Fence | Fail | Release


# --- prefill side: events ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claimed:
    """A decode rank announced its pages, or announced them again after a fence."""

    generation: int
    held: int  # tokens


@dataclass(frozen=True, slots=True)
class Computed:
    """KV of the tokens [0, upto) is in the source pages; ``last`` when that is all."""

    upto: int
    last: bool


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The write in flight returned."""

    ok: bool
    problem: str = ""  # why it failed


@dataclass(frozen=True, slots=True)
class Renewed:
    """The own engine was replaced: no earlier write reads a source page any more."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The decode rank wants no more."""


@dataclass(frozen=True, slots=True)
class Declined:
    """The decode rank computes the prompt itself."""


@dataclass(frozen=True, slots=True)
class ClaimTimeout:
    """Nobody announced pages for this room in time."""

    message: str


OutgoingEvent = (
    Claimed
    | Declined
    | Computed
    | WriteDone
    | Renewed
    | Cancelled
    | Aborted
    | PeerLost
    | ClaimTimeout
)

# --- prefill side: actions --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """Send the tokens [start, stop) to the pages of the latest announcement."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SendDone:
    """All has landed."""

    generation: int


@dataclass(frozen=True, slots=True)
class SendQuiet:
    """Nothing more will land."""


@dataclass(frozen=True, slots=True)
class SendRefused:
    """The room is not served; with ``quiet`` false the peer has to fence."""

    generation: int
    kind: ErrorKind
    message: str
    quiet: bool


@dataclass(frozen=True, slots=True)
class Renew:
    """Replace the own engine, then say Renewed."""


@dataclass(frozen=True, slots=True)
class ReleasePages:
    """No source page is read any more."""

    ok: bool
    message: str


OutgoingAction = Write | SendDone | SendQuiet | SendRefused | Renew | ReleasePages
