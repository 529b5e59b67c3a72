"""The two state machines: the law under random events, and the ways of one room in words."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from core.wire import ErrorKind
from disagg.events import (
    Aborted,
    Announce,
    Cancelled,
    Claimed,
    ClaimTimeout,
    Computed,
    Corrupt,
    Declined,
    Fail,
    Fence,
    Fenced,
    KeptHere,
    LastArrived,
    PeerLost,
    QuietHeard,
    RefusedHeard,
    Release,
    ReleasePages,
    Renew,
    Renewed,
    Reserved,
    SendCancel,
    SendDeclined,
    SendDone,
    SendQuiet,
    SendRefused,
    StartDecoding,
    Write,
    WriteDone,
)
from disagg.handoff import Incoming, IncomingPhase
from disagg.outgoing import MOST_WRITES, Outgoing, OutgoingPhase

BAD = ErrorKind.UNAVAILABLE
generations = st.integers(1, 3)
incoming_events = st.one_of(
    st.just(Reserved()),
    st.just(KeptHere()),
    st.builds(LastArrived, generations, st.just(9)),
    st.builds(Corrupt, generations, st.just("other bytes")),
    st.just(QuietHeard()),
    st.builds(RefusedHeard, generations, st.just(BAD), st.just("no"), st.booleans()),
    st.just(Fenced()),
    st.just(PeerLost("gone")),
    st.just(Aborted(BAD, "left")),
)
outgoing_events = st.one_of(
    st.builds(Claimed, generations, st.integers(0, 3)),
    st.just(Declined()),
    st.builds(Computed, st.integers(0, 8), st.booleans()),
    st.builds(WriteDone, st.booleans()),
    st.just(Renewed()),
    st.just(Cancelled()),
    st.just(Aborted(BAD, "left")),
    st.just(PeerLost("gone")),
    st.just(ClaimTimeout("late")),
)


def drive(machine, *events):
    """Feed events; the last one's actions."""
    actions = ()
    for event in events:
        machine, actions = machine.on(event)
    return machine, actions


def peer_is_quiet(event):
    match event:
        case Fenced() | QuietHeard() | LastArrived() | Corrupt() | RefusedHeard(quiet=True):
            return True
    return False


@given(st.lists(incoming_events, max_size=20))
def test_announced_pages_are_released_on_the_peers_word_or_a_fence_alone(events):
    machine, failed, ended = Incoming(), 0, 0
    for event in events:
        announced = machine.generation > 0
        machine, actions = machine.on(event)
        for action in actions:
            assert not ended, "nothing happens after the end"
            match action:
                case Release():
                    assert peer_is_quiet(event) or not announced
                    assert failed == 1
                    ended += 1
                case StartDecoding():
                    assert isinstance(event, LastArrived)
                    assert not failed
                    ended += 1
                case SendDeclined():
                    assert not announced, "the peer may be writing"
                    assert not failed
                    ended += 1
                case Fail():
                    failed += 1
                    assert failed == 1
        assert machine.over == bool(ended)


@given(st.lists(outgoing_events, max_size=30))
def test_source_pages_are_released_when_nothing_reads_them(events):
    machine, flying, unsafe, ended = Outgoing(), 0, False, False
    for event in events:
        if isinstance(event, WriteDone):
            if not flying:
                continue
            flying, unsafe = flying - 1, unsafe or not event.ok
        if isinstance(event, Renewed):
            if not machine.renewing:
                continue
            unsafe = False
        machine, actions = machine.on(event)
        for action in actions:
            assert not ended, "nothing happens after the end"
            match action:
                case Write(start, stop):
                    assert flying < MOST_WRITES
                    assert not unsafe, "no write with an engine that failed"
                    assert start < stop <= machine.computed
                    flying += 1
                case SendQuiet() | SendDone():
                    assert not flying
                case ReleasePages():
                    assert not flying
                    assert not unsafe
                    ended = True
        assert machine.over == ended


@given(st.lists(outgoing_events, max_size=8))
def test_a_room_that_nobody_claimed_ends_with_its_declined(events):
    machine = drive(Outgoing(), *events)[0]
    claimed = machine.generation > 0
    after, actions = machine.on(Declined())
    if claimed or machine.over:
        assert (after, actions) == (machine, ())
    else:
        assert [type(action) for action in actions] == [ReleasePages]
        assert after.over


@given(st.lists(outgoing_events, max_size=30))
def test_quiet_is_said_only_when_no_failed_write_can_land(events):
    """A failed write can land until the peer announces again, which it does after a fence."""
    machine, loose = Outgoing(), 0  # a generation; 0 is none
    flying: list[int] = []  # of each write
    for event in events:
        if isinstance(event, WriteDone):
            if not flying:
                continue
            under = flying.pop(0)
            loose = loose if event.ok else max(loose, under)
        machine, actions = machine.on(event)
        for action in actions:
            match action:
                case Write():
                    flying.append(machine.generation)
                case SendQuiet() | SendRefused(quiet=True):
                    assert not loose or loose < machine.generation
                    assert not flying


class TestIncoming:
    def announced(self):
        return Incoming().on(Reserved())[0]

    def test_the_good_way(self):
        machine, actions = Incoming().on(Reserved())
        assert actions == (Announce(1),)
        machine, actions = machine.on(LastArrived(1, 42))
        assert (machine.phase, actions) == (IncomingPhase.READY, (StartDecoding(42),))

    def test_a_prompt_kept_here_is_over_at_once_and_stays_so(self):
        machine, actions = Incoming().on(KeptHere())
        assert actions == (SendDeclined(),)
        assert machine.over
        for event in (Reserved(), PeerLost("gone"), Fenced(), Aborted(BAD, "left")):
            assert machine.on(event) == (machine, ())

    def test_announced_pages_cannot_be_kept(self):
        machine = self.announced()
        assert machine.on(KeptHere()) == (machine, ())

    def test_corrupt_kv_fails_the_room_and_needs_no_fence(self):
        machine, actions = drive(self.announced(), Corrupt(1, "other bytes"))
        assert actions == (Fail(BAD, "other bytes"), Release())
        assert machine.phase is IncomingPhase.RELEASED

    def test_cancel_waits_for_quiet(self):
        machine, actions = drive(self.announced(), Aborted(BAD, "left"))
        assert actions == (SendCancel(), Fail(BAD, "left"))
        assert drive(machine, QuietHeard())[1] == (Release(),)

    def test_a_lost_peer_means_a_fence(self):
        machine, actions = drive(self.announced(), PeerLost("gone"))
        assert actions == (Fail(BAD, "gone"), Fence())
        assert drive(machine, Fenced())[1] == (Release(),)

    def test_a_lost_peer_while_cancelling_means_a_fence(self):
        _, actions = drive(self.announced(), Aborted(BAD, "left"), PeerLost("gone"))
        assert actions == (Fence(),)

    def test_anothers_fence_announces_again(self):
        machine, actions = drive(self.announced(), Fenced())
        assert actions == (Announce(2),)
        stale = RefusedHeard(1, BAD, "a write failed", quiet=False)
        assert machine.on(stale) == (machine, ())
        assert drive(machine, LastArrived(1, 5))[1] == (StartDecoding(5),)

    def failed(self, generation, why):
        return RefusedHeard(generation, BAD, why, quiet=False)

    def test_a_failed_write_is_tried_again_after_a_fence(self):
        machine, actions = drive(self.announced(), self.failed(1, "reset"))
        assert actions == (Fence(),)
        assert machine.on(self.failed(1, "reset")) == (machine, ()), "said twice"
        machine, actions = drive(machine, Fenced())
        assert actions == (Announce(2),)
        assert drive(machine, LastArrived(2, 5))[1] == (StartDecoding(5),)

    def test_a_second_failed_write_gives_up_naming_the_first(self):
        machine, _ = drive(self.announced(), self.failed(1, "reset"), Fenced())
        machine, actions = drive(machine, self.failed(2, "unreachable"))
        assert actions == (SendCancel(), Fail(BAD, "reset; then unreachable"), Fence())
        assert machine.phase is IncomingPhase.FENCING

    def test_a_fence_for_another_room_is_no_attempt(self):
        machine, _ = drive(self.announced(), Fenced(), self.failed(1, "the fence"))
        _, actions = drive(machine, self.failed(2, "reset"))
        assert actions == (Fence(),)

    @pytest.mark.parametrize(
        ("event", "kind", "after"),
        [
            (PeerLost("gone"), BAD, Fence()),
            (RefusedHeard(1, ErrorKind.INVALID, "gone", quiet=True), ErrorKind.INVALID, Release()),
        ],
    )
    def test_whatever_ends_a_second_attempt_the_first_cause_is_told(self, event, kind, after):
        machine, _ = drive(self.announced(), self.failed(1, "reset"), Fenced())
        assert drive(machine, event)[1] == (Fail(kind, "reset; then gone"), after)

    def test_a_cancel_after_a_failed_write_ends_with_the_fence_that_is_due(self):
        machine, _ = drive(self.announced(), self.failed(1, "reset"), Aborted(BAD, "left"))
        assert drive(machine, Fenced())[1] == (Release(),)

    def test_an_answer_from_the_future_is_dropped(self):
        machine = self.announced()
        assert machine.on(LastArrived(2, 5)) == (machine, ())


class TestOutgoing:
    def claimed(self, held=2):
        return drive(Outgoing(), Claimed(1, held))[0]

    def test_chunks_are_written_two_at_a_time_from_what_is_held(self):
        machine, actions = drive(self.claimed(), Computed(4, last=False))
        assert actions == (Write(2, 4),)
        machine, actions = drive(machine, Computed(6, last=False))
        assert actions == (Write(4, 6),)
        machine, actions = drive(machine, Computed(7, last=False), Computed(8, last=False))
        assert actions == ()
        machine, actions = drive(machine, WriteDone(ok=True))
        assert actions == (Write(6, 8),)
        assert machine.sent == 2, "which of the two returned is not known"
        machine, actions = drive(machine, Computed(8, last=True), WriteDone(ok=True))
        assert actions == ()
        machine, actions = drive(machine, WriteDone(ok=True))
        assert actions == (SendDone(1), ReleasePages(True, ""))
        assert machine.on(WriteDone(ok=True)) == (machine, ())

    def two(self):
        return drive(self.claimed(), Computed(4, last=False), Computed(8, last=True))[0]

    @pytest.mark.parametrize("first", [True, False])
    def test_of_two_writes_one_fails_and_nothing_of_both_counts(self, first):
        machine, actions = drive(self.two(), WriteDone(ok=first, problem="" if first else "reset"))
        assert actions == ()
        machine, actions = drive(machine, WriteDone(ok=not first, problem="reset" if first else ""))
        assert actions == (SendRefused(1, BAD, "a KV write failed: reset", False), Renew())
        _, actions = drive(machine, Claimed(2, 2), Renewed())
        assert actions == (Write(2, 8),)

    def test_after_a_failure_no_write_joins_the_one_in_flight(self):
        machine, _ = drive(self.claimed(), Computed(4, last=False), Computed(6, last=False))
        _, actions = drive(machine, WriteDone(ok=False), Computed(8, last=True))
        assert actions == ()

    def test_no_write_joins_one_of_an_older_announcement(self):
        machine, _ = drive(self.claimed(), Computed(4, last=False), Claimed(2, 2))
        machine, actions = drive(machine, Computed(8, last=True))
        assert actions == ()
        assert drive(machine, WriteDone(ok=True))[1] == (Write(4, 8),)

    @pytest.mark.parametrize("ok", [True, False])
    def test_a_cancel_waits_for_both_writes(self, ok):
        machine, actions = drive(self.two(), Cancelled(), WriteDone(ok=ok))
        assert actions == ()
        machine, actions = drive(machine, WriteDone(ok=True))
        if not ok:
            assert actions == (SendRefused(1, BAD, "a KV write failed", False), Renew())
            machine, actions = drive(machine, Renewed())
            assert machine.over
        else:
            assert actions == (SendQuiet(), ReleasePages(False, "the decode rank cancelled"))

    def test_a_declined_room_closes_at_once_whatever_is_computed(self):
        for before in ((), (Computed(4, last=False),), (Computed(8, last=True),)):
            machine, actions = drive(Outgoing(), *before, Declined())
            (release,) = actions
            assert not release.ok
            assert isinstance(machine.ending, Declined)
            assert drive(machine, Claimed(1, 0))[1] == ()

    def test_a_claimed_room_is_not_declined_any_more(self):
        machine = self.claimed()
        assert machine.on(Declined()) == (machine, ())

    def test_a_late_claim_sends_all_that_is_there(self):
        _, actions = drive(Outgoing(), Computed(8, last=True), Claimed(1, 0))
        assert actions == (Write(0, 8),)

    def test_nothing_to_send_is_done_at_once(self):
        _, actions = drive(Outgoing(), Claimed(1, 8), Computed(8, last=True))
        assert actions == (SendDone(1), ReleasePages(True, ""))

    def failing(self):
        return drive(self.claimed(), Computed(8, last=True), WriteDone(ok=False))

    def test_a_failed_write_is_told_and_renewed_and_resumed(self):
        machine, actions = self.failing()
        assert actions == (SendRefused(1, BAD, "a KV write failed", False), Renew())
        machine, actions = drive(machine, Claimed(2, 2))
        assert actions == ()
        _, actions = drive(machine, Renewed())
        assert actions == (Write(2, 8),)

    def test_the_peer_hears_why_a_write_failed(self):
        machine, _ = drive(self.claimed(), Computed(8, last=True))
        _, actions = drive(machine, WriteDone(ok=False, problem="reset"))
        assert actions == (SendRefused(1, BAD, "a KV write failed: reset", False), Renew())

    def test_a_failed_write_and_a_cancel(self):
        machine, actions = drive(self.failing()[0], Cancelled())
        assert actions == ()
        _, actions = drive(machine, Renewed())
        assert actions == (ReleasePages(False, "the decode rank cancelled"),)

    def test_a_write_that_failed_by_the_peers_fence_is_not_reported(self):
        machine, _ = drive(self.claimed(), Computed(8, last=True), Claimed(2, 2))
        machine, actions = drive(machine, WriteDone(ok=False))
        assert actions == (Renew(),)
        assert drive(machine, Renewed())[1] == (Write(2, 8),)

    def test_a_cancel_waits_for_the_write_in_flight(self):
        machine, actions = drive(self.claimed(), Computed(8, last=False), Cancelled())
        assert (machine.phase, actions) == (OutgoingPhase.DRAINING, ())
        _, actions = drive(machine, WriteDone(ok=True))
        assert actions == (SendQuiet(), ReleasePages(False, "the decode rank cancelled"))

    def test_an_abort_reaches_the_peer(self):
        _, actions = drive(self.claimed(), Aborted(ErrorKind.INVALID, "too long"))
        refused = SendRefused(1, ErrorKind.INVALID, "too long", True)
        assert actions == (refused, ReleasePages(False, "too long"))

    def test_an_abort_that_crosses_the_peers_fence_is_answered_again(self):
        machine, _ = drive(self.claimed(), Computed(8, last=True), Aborted(BAD, "left"))
        machine, actions = drive(machine, WriteDone(ok=False))
        assert actions == (SendRefused(1, BAD, "left", False), Renew())
        machine, actions = drive(machine, Claimed(2, 2))
        assert actions == (SendRefused(2, BAD, "left", True),)
        assert drive(machine, Renewed())[1] == (ReleasePages(False, "left"),)

    @pytest.mark.parametrize("event", [ClaimTimeout("late"), Aborted(BAD, "late")])
    def test_unclaimed_rooms_close_at_once(self, event):
        machine, actions = drive(Outgoing(), Computed(3, last=False), event)
        assert actions == (ReleasePages(False, "late"),)
        assert drive(machine, Claimed(1, 0))[1] == ()
