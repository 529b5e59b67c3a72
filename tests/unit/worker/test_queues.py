"""What a dump shows of an engine: every sequence, every open handoff, every page."""

from __future__ import annotations

from core.clock import VirtualClock
from core.rpc.events import PeerMessage
from tests.support.calm_pair import CalmPair
from tests.support.engines import Listener, make_unified
from tests.support.requests import request
from worker.queues import queues
from worker.recorder import Recorder

PROMPT = [1, 2, 3, 4, 5]


def test_running_sequences_come_first_and_then_those_that_wait_in_order():
    clock = VirtualClock()
    engine = make_unified(max_running=1)
    engine.recorder = Recorder(clock)
    listener = Listener(engine)
    for rid in ("first", "second", "third"):
        listener.submit(request(rid, PROMPT, 8), router="router-1")
        clock.advance(1.0)
    listener.step(3)
    view = queues(engine, clock.now())
    assert [(s.rid, s.state, s.age_s) for s in view.sequences] == [
        ("first", "running", 3.0),
        ("second", "waiting", 2.0),
        ("third", "waiting", 1.0),
    ]
    first, second, _ = view.sequences
    assert (first.prompt, first.output, first.computed) == (5, 3, 7)
    assert first.row >= 0
    assert second.row == -1
    assert first.router == "router-1"
    assert view.pages == engine.scheduler.cache.account()
    assert view.rooms == ()
    load = engine.load()
    assert (load.oldest_waiting_s, load.waiting_requests) == (2.0, 2)


def test_both_sides_of_a_handoff_show_its_room():
    pair, clock = CalmPair(), VirtualClock()
    for engine in (pair.prefill, pair.decode):
        engine.recorder = Recorder(clock)
    pair.send(pair.ask("r", PROMPT, 4, room=7))
    clock.advance(2.0)
    pair.step(pair.decode)  # announces
    (room,) = queues(pair.decode, clock.now()).rooms
    assert (room.room, room.rid, room.phase, room.total) == (7, "r", "announced", 5)
    assert room.age_s == 2.0
    (room,) = queues(pair.prefill, clock.now()).rooms
    assert (room.phase, room.peer, room.computed) == ("unclaimed", "", 0)
    pair.prefill.handle(PeerMessage("link0", pair.to_prefill.popleft()))
    pair.step(pair.prefill, 3)
    (room,) = queues(pair.prefill, clock.now()).rooms
    assert (room.phase, room.peer) == ("sending", "link0")
    assert (room.sent, room.computed, room.total) == (0, 5, 5)
    pair.settle()
    assert queues(pair.prefill, clock.now()).rooms == queues(pair.decode, clock.now()).rooms == ()


def test_an_announcement_that_overtook_its_request_has_no_age():
    pair = CalmPair()
    pair.send(pair.ask("r", PROMPT, 4, room=7), pair.decode)
    pair.step(pair.decode)
    pair.prefill.handle(PeerMessage("link0", pair.to_prefill.popleft()))
    (room,) = queues(pair.prefill, 0.0).rooms
    assert (room.room, room.rid, room.phase, room.age_s) == (7, "r", "early", None)
