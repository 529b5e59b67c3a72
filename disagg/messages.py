"""Control messages between the two ranks of a handoff; one union and one codec a direction.

They travel over the peer link, which keeps their order and reports its own loss. KV bytes travel
beside it, through a KVTransport. Every message names its ``room``, the rendezvous of one request.
``generation`` counts the announcements of one room: it rises by one when the decode rank has
fenced its transport, and tells an answer to the old announcement from one to the new.
"""

from __future__ import annotations

import msgspec

from core.codec import Codec
from core.wire import ErrorKind, Int32Array, unpack_ids
from disagg.geometry import PageGeometry


class Announcement(msgspec.Struct, frozen=True, kw_only=True, tag="announcement"):
    """Decode to prefill: the slots I hold for you, and where they are."""

    room: int
    rid: str
    generation: int  # 1 for the first announcement
    held: int  # tokens the decode rank already has, from the front of the prompt
    pages: bytes  # int32 destination slots of the tokens [held, length of the prompt)
    geometry: PageGeometry
    address: str  # the transport session to write to
    bases: tuple[int, ...]  # address of each region's slot 0

    def slots(self) -> Int32Array:
        """The destination slots, read-only."""
        return unpack_ids(self.pages)


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Decode to prefill: stop, and tell me when nothing of yours can land any more."""

    room: int


class Declined(msgspec.Struct, frozen=True, kw_only=True, tag="declined"):
    """Decode to prefill: I compute this prompt myself, and will announce nothing."""

    room: int


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag="moved"):
    """Decode to prefill: I am at this address now, and nothing is at any earlier one.

    Announcements that are open follow. The peer can let go of its connections to the dead engine.
    """

    address: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Prefill to decode: all KV is in your pages; nothing more comes."""

    room: int
    generation: int
    first_token: int  # the id sampled from the prompt's last position
    checksums: tuple[int, ...] = ()  # as in disagg.checksum; empty: this room is not checked
    whole: bool = False  # they are over all that crossed, and not only over a part of it


class Quiet(msgspec.Struct, frozen=True, kw_only=True, tag="quiet"):
    """Prefill to decode: no write of mine for this room is left, nor will one come."""

    room: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Prefill to decode: this room will not be served, and why.

    With ``quiet`` false a failed write may still land: only a fence makes the pages safe.
    """

    room: int
    generation: int
    kind: ErrorKind
    message: str
    quiet: bool


ToPrefill = Announcement | Cancel | Declined | Moved
ToDecode = Done | Quiet | Refused


def to_prefill_codec() -> Codec[ToPrefill]:
    """What a decode rank sends."""
    return Codec(ToPrefill)


def to_decode_codec() -> Codec[ToDecode]:
    """What a prefill rank sends."""
    return Codec(ToDecode)
