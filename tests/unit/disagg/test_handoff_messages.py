"""Messages survive the wire, and malformed ones are refused by the codec."""

from __future__ import annotations

import msgspec
import pytest

from core.wire import ErrorKind, pack_ids
from disagg.geometry import PageGeometry
from disagg.messages import (
    Announcement,
    Cancel,
    Done,
    Quiet,
    Refused,
    to_decode_codec,
    to_prefill_codec,
)

ANNOUNCEMENT = Announcement(
    room=(1 << 63) - 1,
    rid="r-1",
    generation=1,
    held=3,
    pages=pack_ids([7, 8, 5]),
    geometry=PageGeometry(kind="mha", slot_bytes=(64, 64), dtype="bfloat16", revision="abc"),
    address="127.0.0.1:15001",
    bases=((1 << 47) + 5, (1 << 46)),
)
TO_DECODE = (
    Done(room=5, generation=1, first_token=11),
    Quiet(room=5),
    Refused(room=5, generation=2, kind=ErrorKind.INVALID, message="why", quiet=True),
)


@pytest.mark.parametrize("message", [ANNOUNCEMENT, Cancel(room=5)])
def test_what_decode_sends_survives_the_wire(message):
    codec = to_prefill_codec()
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("message", TO_DECODE)
def test_what_prefill_sends_survives_the_wire(message):
    codec = to_decode_codec()
    assert codec.decode(codec.encode(message)) == message


def test_slots_are_what_was_packed():
    assert ANNOUNCEMENT.slots().tolist() == [7, 8, 5]


def test_a_message_for_the_other_side_is_refused():
    with pytest.raises(msgspec.ValidationError):
        to_prefill_codec().decode(to_decode_codec().encode(TO_DECODE[0]))
