"""A decode rank that has fenced has another address: its peers hear it and forget the old one."""

from __future__ import annotations

from disagg.messages import Done, Moved
from tests.support.handoff_sides import SLOTS, announcement


def test_a_peer_that_moved_is_forgotten_where_it_was_at_once(prefill, decode, monkeypatch):
    gone = []
    monkeypatch.setattr(prefill.transport, "forget", gone.append)
    prefill.sender.open(1, "r", 4)
    prefill.hear(announcement(decode))
    old = decode.transport.address
    prefill.hear(Moved(address=decode.transport.renew()))
    assert gone == [old]
    prefill.hear(Moved(address=decode.transport.address))
    prefill.hear(announcement(decode, generation=2))
    assert gone == [old]
    prefill.sender.on_peer_lost("d")
    assert gone == [old, decode.transport.address]


def test_a_fence_is_told_to_every_peer_that_may_be_connected_and_to_no_other(decode):
    for room, peer in ((1, "served"), (2, "lost"), (3, "gone before")):
        decode.receiver.announce(room, "r", peer, 0, SLOTS)
    decode.receiver.decline(4, "r", "never written to")
    decode.hear(Done(room=1, generation=1, first_token=1), peer="served")
    decode.hear(Done(room=3, generation=1, first_token=1), peer="gone before")
    decode.receiver.on_peer_lost("gone before")
    decode.receiver.on_peer_lost("lost")
    decode.receiver.poll()
    told = [(peer, word) for peer, word in decode.out if isinstance(word, Moved)]
    assert told == [("served", Moved(address=decode.transport.address))]
