"""Heartbeats that echo: what one end of a stream knows of both of its directions.

A *beat* carries the number of the sender's newest heartbeat and that of the other end's newest one
that it has heard. Whoever hears a new number says so at once. An end counts as silence the time
since it sent the newest of its own heartbeats that has been heard: so both ends notice when either
direction is lost. What comes in does not show that: over TCP, what the other end sends still
arrives for a while after our acknowledgements no longer do.
"""

from __future__ import annotations

import struct
from collections import deque

import msgspec

from core.lease import SLACK_S

MARK = b"\xc1"  # the byte that begins no value of msgpack: messages are msgpack
_BEAT = struct.Struct("<cQQ")  # mark, number of the sender's newest, of the newest it has heard


class Beats:
    """The account of one end. Pure: ``now`` is the caller's time, in seconds."""

    def __init__(self, now: float) -> None:
        self._number = 0  # of the newest beat of this end
        self._sent: deque[tuple[int, float]] = deque()  # those not known to be heard, and when
        self._since = now  # when the newest one that was heard was sent
        self._looked = now
        self._heard = 0  # the other end's newest

    def begin(self, now: float) -> None:
        """Another beat of this end is due; it is sent with the next ``frame``."""
        self._number += 1
        self._sent.append((self._number, now))

    def frame(self) -> bytes:
        """The beat to send now, whether a new one of this end or an answer."""
        return _BEAT.pack(MARK, self._number, self._heard)

    def hear(self, frame: bytes) -> bool:
        """Take in a beat of the other end; whether it has to be answered.

        Raises msgspec.ValidationError where it is none.
        """
        try:
            _, number, echoed = _BEAT.unpack(frame)
        except struct.error as error:
            raise msgspec.ValidationError(f"not a heartbeat: {error}") from error
        while self._sent and self._sent[0][0] <= echoed:
            _, self._since = self._sent.popleft()
        heard, self._heard = self._heard, number
        return bool(number != heard)

    def silence_s(self, now: float, meant_s: float) -> float:
        """For how long nothing was heard of this end, after a wait meant to take ``meant_s``.

        The time in which this process itself stood still counts for nobody: a process that was
        stopped, or a machine that was frozen, wakes with answers that it has not read yet.
        """
        late_s = now - self._looked - meant_s
        if late_s > SLACK_S:
            self._since += late_s
            self._sent = deque((number, sent + late_s) for number, sent in self._sent)
        self._looked = now
        return now - self._since
