"""Wire types to bytes and back (msgpack). Never pickle. Decoding validates every field."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from core import wire

T = TypeVar("T")


class Codec(Generic[T]):
    """Encoder and validating decoder of one type. ``decode`` raises msgspec.DecodeError."""

    def __init__(self, kind: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def encode(self, value: T) -> bytes:
        return self._encoder.encode(value)

    def decode(self, data: bytes) -> T:
        result: T = self._decoder.decode(data)
        return result


def to_rank_codec() -> Codec[wire.ToRank]:
    """What a router sends on a session."""
    return Codec(wire.ToRank)


def to_router_codec() -> Codec[wire.ToRouter]:
    """What a rank sends on a session."""
    return Codec(wire.ToRouter)
