"""What a rank and its transfer process say to each other: msgpack, a message a datagram.

They have one *control* socket, over which the rank is answered in turn, and a few *lanes*: a write
takes a free lane for as long as it lasts, so that many are under way at once and none waits for
another's answer. All are Unix sockets that keep the bounds of messages (SOCK_SEQPACKET).
"""

from __future__ import annotations

import msgspec

FRAME_BYTES = 1 << 17  # no message is longer; the system takes up to 200 KiB at once


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first word on the control socket; answered with Ready."""

    host: str
    protocol: str
    device: str
    used: tuple[str, ...]  # addresses that must not be taken again; at most some hundreds


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Map the file that comes along, and let transfers use this part; answered with Opened."""

    offset: int
    length: int  # bytes


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Say Ready again."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine listens."""

    address: str


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """The part is registered, and lies here in the transfer process."""

    address: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """What was asked for could not be done."""

    message: str
    operator: bool = False  # whether the operator can mend it


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, on a lane; answered with Written."""

    target: str
    columns: bytes  # int64: all sources, here; all targets, there; all lengths


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's return code: 0 when all is visible to the target."""

    code: int


Order = Start | Open | Check
Answer = Ready | Opened | Failed
