"""What a sender remembers of rooms is bounded."""

from __future__ import annotations

from core.wire import ErrorKind
from disagg.geometry import PageGeometry
from disagg.messages import Announcement
from disagg.registers import EarlyClaims, Grave, Graveyard

GEOMETRY = PageGeometry(kind="mla", slot_bytes=(8,), dtype="float32", revision="r1")


def announcement(room, generation=1):
    return Announcement(
        room=room,
        rid="r",
        generation=generation,
        held=0,
        pages=b"",
        geometry=GEOMETRY,
        address="a",
        bases=(1,),
    )


def test_the_oldest_grave_is_forgotten_first():
    graves = Graveyard(limit=2)
    for room in (1, 2, 3):
        graves.bury(room, Grave(1, True, ErrorKind.UNAVAILABLE, "over"))
    assert [room in graves for room in (1, 2, 3)] == [False, True, True]


def test_early_claims_are_bounded():
    early = EarlyClaims(limit=1)
    assert early.keep("d", announcement(1))
    assert not early.keep("d", announcement(2))
    assert early.keep("d", announcement(1, generation=2))


def test_the_newest_announcement_of_the_first_claimant_is_kept():
    early = EarlyClaims()
    early.keep("d", announcement(1, generation=2))
    early.keep("d", announcement(1, generation=1))
    early.keep("other", announcement(1, generation=5))
    claim = early.pop(1)
    assert claim is not None
    assert (claim.peer, claim.message.generation) == ("d", 2)
