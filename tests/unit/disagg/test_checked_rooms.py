"""Rooms whose KV is checked: what the prefill rank sums, and what the decode rank compares."""

from __future__ import annotations

from core.wire import ErrorKind
from disagg import checksum
from disagg.checksum import digests
from disagg.messages import Done
from disagg.receiver import Failed, Ready, Released
from tests.support.handoff_sides import GEOMETRY, SLOTS, Decode, Prefill, announcement


def test_the_last_write_brings_checksums_of_all_that_crossed(hub, decode):
    prefill = Prefill(hub, check="all")
    prefill.sender.open(1, "r", 4)
    prefill.hear(announcement(decode, held=1, pages=SLOTS[1:]))
    prefill.memory[:4] = 7
    prefill.sender.push(1, SLOTS[:2])
    prefill.run()
    prefill.sender.push(1, SLOTS)
    prefill.sender.finish(1, 5)
    prefill.run()
    (done,) = prefill.take()
    assert done.checksums == digests(GEOMETRY, decode.bases, SLOTS[1:], 1) != ()


def test_where_all_is_checked_both_ranks_read_every_byte(hub, monkeypatch):
    monkeypatch.setattr(checksum, "CHECK_BYTES", 8)  # the latest token alone
    cases = (("sample", 64, 1, Ready), ("all", 1, 1, Failed), ("all", 1, 0, Ready))
    for mode, room, change, found in cases:
        prefill, decode = Prefill(hub, check=mode), Decode(hub)
        decode.receiver.announce(room, "r", "p", 0, SLOTS)
        prefill.sender.open(room, "r", 4)
        prefill.hear(*decode.take())
        prefill.sender.push(room, SLOTS)
        prefill.sender.finish(room, 5)
        prefill.run()
        decode.memory[0] ^= change  # the first token, on the way
        decode.hear(*prefill.take())
        assert isinstance(decode.receiver.poll()[0], found)


def test_one_room_in_64_is_checked(prefill, decode):
    checked = []
    for room in range(1, 129):
        prefill.sender.open(room, "r", 4)
        prefill.hear(announcement(decode, room=room))
        prefill.sender.push(room, SLOTS)
        prefill.sender.finish(room, 5)
        prefill.run()
        (done,) = prefill.take()
        checked += [room] * bool(done.checksums)
    assert checked == [64, 128]
    assert prefill.sender.report().checked == 2


def test_kv_that_is_not_what_was_sent_fails_the_room(decode, caplog):
    decode.receiver.announce(1, "r", "p", 0, SLOTS)
    right = digests(GEOMETRY, decode.bases, SLOTS, 1)
    decode.memory[2] = 1  # after the sender summed
    here = digests(GEOMETRY, decode.bases, SLOTS, 1)
    decode.hear(Done(room=1, generation=1, first_token=4, checksums=right))
    failed, released = decode.receiver.poll()
    assert failed.kind is ErrorKind.UNAVAILABLE
    for value in (*right, *here):
        assert f"{value:016x}" in failed.message
        assert f"{value:016x}" in caplog.text
    assert released == Released(1)
    assert decode.receiver.report().failed == {"checksum": 1}


def test_checksums_that_agree_are_counted(decode):
    decode.receiver.announce(1, "r", "p", 0, SLOTS)
    right = digests(GEOMETRY, decode.bases, SLOTS, 1)
    decode.hear(Done(room=1, generation=1, first_token=4, checksums=right))
    assert decode.receiver.poll() == [Ready(1, 4)]
    report = decode.receiver.report()
    assert report.checked == 1
    assert report.phases["check"].count == report.phases["ready"].count == 1
