"""The shells of both sides: refusals, early and late messages, timeouts, fences, counters."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import numpy as np
import pytest

from core.errors import EngineError, RequestError, TransferError
from core.wire import ErrorKind
from disagg.messages import (
    Cancel,
    Declined,
    Done,
    Moved,
    Quiet,
    Refused,
    to_decode_codec,
    to_prefill_codec,
)
from disagg.receiver import Failed, Ready, Released
from disagg.registers import Closed
from disagg.sender import Sender
from disagg.transport.inproc import Fault
from tests.support.handoff_sides import GEOMETRY, SLOTS, Prefill, Side, announcement


def test_a_prompt_crosses_in_chunks(prefill, decode):
    prefill.memory[:] = np.arange(128, dtype=np.uint8).reshape(16, 8)
    targets = np.array([9, 8, 3], np.int32)
    decode.receiver.announce(1, "r", "p", 1, targets)
    assert decode.receiver.counts() == {"announced": 1}
    (message,) = decode.take()
    prefill.hear(message)
    assert prefill.sender.counts() == {"early": 1}
    prefill.sender.open(1, "r", 4)
    sources = np.array([5, 6, 7, 2], np.int32)
    prefill.sender.push(1, sources[:2])
    assert prefill.sender.counts() == {"sending": 1}
    prefill.jobs.run_one()
    assert prefill.wakes
    prefill.sender.push(1, sources)
    prefill.sender.finish(1, 77)
    assert prefill.run() == [Closed(1, True, "")]
    (done,) = prefill.take()
    assert done == Done(room=1, generation=1, first_token=77)
    decode.hear(done)
    assert decode.receiver.poll() == [Ready(1, 77)]
    assert (decode.memory[targets] == prefill.memory[sources[1:]]).all()
    assert decode.receiver.bytes_received == prefill.sender.bytes_sent == 24
    assert decode.receiver.counts() == prefill.sender.counts() == {}


class TestSender:
    def test_a_foreign_geometry_is_refused_naming_both_values(self, prefill, decode):
        other = msgspec.structs.replace(GEOMETRY, dtype="bfloat16")
        prefill.sender.open(1, "r", 4)
        prefill.hear(announcement(decode, geometry=other))
        (refused,) = prefill.take()
        assert refused.quiet
        assert "float32" in refused.message
        assert "bfloat16" in refused.message
        assert prefill.sender.poll(0.0) == [Closed(1, False, refused.message)]

    @pytest.mark.parametrize(
        "wrong", [{"rid": "other"}, {"held": 1}, {"pages": np.arange(5, dtype=np.int32)}]
    )
    def test_an_announcement_that_does_not_fit_the_request_is_refused(self, prefill, decode, wrong):
        prefill.sender.open(1, "r", 4)
        prefill.hear(announcement(decode, **wrong))
        (refused,) = prefill.take()
        assert (refused.kind, refused.quiet) == (ErrorKind.INTERNAL, True)

    def test_an_early_announcement_expires(self, prefill, decode):
        prefill.hear(announcement(decode))
        prefill.sender.poll(1000.0)
        prefill.sender.poll(1009.0)
        assert prefill.take() == []
        prefill.sender.poll(1010.0)
        (refused,) = prefill.take()
        assert (refused.room, refused.quiet) == (1, True)
        prefill.sender.open(1, "r", 4)
        (closed,) = prefill.sender.poll(1010.0)
        assert not closed.ok

    def test_an_unclaimed_room_times_out_and_answers_afterwards(self, prefill, decode):
        prefill.sender.open(1, "r", 4)
        assert prefill.sender.poll(1000.0) == []
        (closed,) = prefill.sender.poll(1010.0)
        assert "10 s" in closed.message
        prefill.hear(announcement(decode))
        (refused,) = prefill.take()
        assert (refused.message, refused.quiet) == (closed.message, True)

    def test_a_cancel_before_open_closes_the_later_open(self, prefill, decode):
        prefill.hear(announcement(decode))
        prefill.hear(Cancel(room=1))
        assert prefill.take() == [Quiet(room=1)]
        prefill.sender.open(1, "r", 4)
        assert prefill.sender.poll(0.0) == [Closed(1, False, "the decode rank cancelled")]

    def test_an_abort_before_open_reaches_the_decode_rank(self, prefill, decode):
        prefill.hear(announcement(decode))
        prefill.sender.abort(1, ErrorKind.INVALID, "too long")
        (refused,) = prefill.take()
        assert (refused.kind, refused.message) == (ErrorKind.INVALID, "too long")

    def test_an_abort_before_the_announcement_reaches_the_decode_rank(self, prefill, decode):
        prefill.sender.open(1, "r", 4)
        prefill.sender.abort(1, ErrorKind.OVERLOADED, "full")
        prefill.hear(announcement(decode))
        (refused,) = prefill.take()
        assert (refused.kind, refused.message) == (ErrorKind.OVERLOADED, "full")

    def test_a_duplicate_announcement_of_a_closed_room_is_dropped(self, prefill, decode):
        self.serve(prefill, decode)
        prefill.take()
        prefill.hear(announcement(decode))
        assert prefill.take() == []
        assert prefill.sender.counts() == {}

    def test_a_closed_room_does_not_open_again(self, prefill, decode):
        self.serve(prefill, decode)
        prefill.sender.open(1, "r", 4)
        (closed,) = prefill.sender.poll(0.0)
        assert not closed.ok

    def test_a_lost_peer_buries_what_it_announced_early(self, prefill, decode):
        prefill.hear(announcement(decode))
        prefill.sender.on_peer_lost("d")
        assert prefill.sender.counts() == {}
        prefill.sender.open(1, "r", 4)
        (closed,) = prefill.sender.poll(0.0)
        assert not closed.ok

    def test_a_declined_room_closes_without_a_word(self, prefill):
        prefill.sender.open(1, "r", 4)
        prefill.sender.push(1, SLOTS[:2])
        prefill.hear(Declined(room=1))
        (closed,) = prefill.sender.poll(0.0)
        assert (closed.ok, closed.declined) == (False, True)
        assert prefill.take() == []
        assert prefill.sender.report().failed == {}

    def test_a_room_declined_before_its_request_closes_the_later_open(self, prefill):
        prefill.hear(Declined(room=1))
        prefill.sender.open(1, "r", 4)
        (closed,) = prefill.sender.poll(0.0)
        assert closed.declined
        assert prefill.sender.counts() == {}

    def test_a_report_counts_what_happened(self, prefill, decode):
        prefill.sender.open(1, "r", 4)
        prefill.hear(announcement(decode, held=1, pages=SLOTS[1:]))
        prefill.sender.push(1, SLOTS)
        assert prefill.sender.report().held_pages == 4
        prefill.sender.finish(1, 5)
        prefill.run()
        prefill.sender.open(2, "r", 4)
        prefill.sender.abort(2, ErrorKind.INVALID, "too long")
        report = prefill.sender.report()
        assert (report.prompt_tokens, report.delta_tokens, report.moved_bytes) == (4, 3, 24)
        assert report.failed == {"aborted": 1}
        assert {name: times.count for name, times in report.phases.items()} == {
            "claim": 1,
            "send": 1,
        }
        assert report.held_pages == 0

    def test_a_second_claimant_is_refused(self, prefill, decode):
        prefill.sender.open(1, "r", 4)
        prefill.hear(announcement(decode))
        prefill.hear(announcement(decode), peer="another")
        assert prefill.out[-1][0] == "another"
        assert prefill.out[-1][1].quiet

    def test_a_renewal_serves_no_write_that_failed_after_it_began(self, hub, prefill, decode):
        hub.fault = lambda target, copies: Fault.LATE
        for room in (1, 2):
            prefill.sender.open(room, "r", 4)
            prefill.hear(announcement(decode, room=room))
            prefill.sender.push(room, SLOTS)
        prefill.jobs.run_one()
        prefill.sender.poll(0.0)  # room 1 failed: its renewal waits
        prefill.hear(Cancel(room=1))
        prefill.hear(Cancel(room=2))
        prefill.jobs.run_one()  # room 2 fails, the renewal has been submitted already
        prefill.sender.poll(0.0)
        prefill.jobs.run_one()
        assert [closed.room for closed in prefill.sender.poll(0.0)] == [1]
        prefill.jobs.run_one()
        assert [closed.room for closed in prefill.sender.poll(0.0)] == [2]

    def test_a_target_gets_a_few_lanes(self, prefill, decode):
        for room in range(1, 6):
            prefill.sender.open(room, "r", 4)
            prefill.hear(announcement(decode, room=room))
            prefill.sender.push(room, SLOTS)
            prefill.sender.finish(room, 1)
        assert len(prefill.jobs.waiting) == 2
        assert [closed.room for closed in prefill.run()] == [1, 2, 3, 4, 5]

    def test_a_defect_in_a_write_surfaces(self, hub, decode):
        prefill = Prefill(hub)
        prefill.sender.open(1, "r", 4)
        prefill.hear(announcement(decode))
        prefill.sender.push(1, np.arange(100, 104, dtype=np.int32))  # beyond the pool
        prefill.jobs.run_all()
        with pytest.raises(EngineError, match="never registered"):
            prefill.sender.poll(0.0)

    def test_what_cannot_be_read_is_the_links_end(self, prefill):
        with pytest.raises(TransferError, match="peer d sent"):
            prefill.sender.on_message("d", b"\xc1")

    def test_a_live_room_is_not_opened_twice(self, prefill):
        prefill.sender.open(1, "r", 4)
        with pytest.raises(RequestError):
            prefill.sender.open(1, "r", 4)

    def test_real_threads_write_and_wake(self, hub, decode):
        side = Side(hub, to_decode_codec().decode)
        woken = Future()
        sender = Sender(
            side.transport,
            GEOMETRY,
            side.bases,
            side.send,
            lambda: woken.done() or woken.set_result(None),
        )
        sender.open(1, "r", 4)
        sender.on_message("d", to_prefill_codec().encode(announcement(decode)))
        side.memory[:4] = 7
        sender.push(1, SLOTS)
        sender.finish(1, 3)
        woken.result(timeout=10)
        assert sender.poll(0.0) == [Closed(1, True, "")]
        assert (decode.memory[:4] == 7).all()
        sender.close()

    def serve(self, prefill, decode):
        prefill.sender.open(1, "r", 4)
        prefill.hear(announcement(decode))
        prefill.sender.push(1, SLOTS)
        prefill.sender.finish(1, 5)
        assert prefill.run() == [Closed(1, True, "")]


class TestReceiver:
    def test_cancel_holds_the_pages_until_quiet(self, decode):
        decode.receiver.announce(1, "r", "p", 0, SLOTS)
        decode.receiver.cancel(1, "client left")
        assert decode.receiver.poll() == [Failed(1, ErrorKind.UNAVAILABLE, "client left")]
        assert decode.take()[-1] == Cancel(room=1)
        assert decode.receiver.counts() == {"cancelling": 1}
        decode.hear(Quiet(room=1))
        assert decode.receiver.poll() == [Released(1)]

    def test_one_fence_serves_all_rooms_of_a_lost_peer_and_moves_the_rest(self, decode):
        old = decode.transport.address
        for room, peer in ((1, "p"), (2, "p"), (3, "other")):
            decode.receiver.announce(room, "r", peer, 0, SLOTS)
        decode.take()
        decode.receiver.on_peer_lost("p")
        assert decode.transport.address == old
        outcomes = decode.receiver.poll()
        assert [type(outcome) for outcome in outcomes] == [Failed, Failed, Released, Released]
        moved, again = decode.take()
        assert moved == Moved(address=decode.transport.address)
        assert (again.room, again.generation) == (3, 2)
        assert again.address == decode.transport.address != old

    def test_an_unquiet_refusal_of_an_ended_room_is_answered(self, decode):
        refused = Refused(room=9, generation=1, kind=ErrorKind.UNAVAILABLE, message="", quiet=False)
        decode.hear(refused)
        assert decode.out == [("p", Cancel(room=9))]

    def test_words_for_other_rooms_change_nothing(self, decode):
        decode.receiver.announce(1, "r", "p", 0, SLOTS)
        decode.hear(Done(room=1, generation=1, first_token=1), peer="stranger")
        decode.hear(Quiet(room=2))
        assert decode.receiver.poll() == []
        assert decode.receiver.counts() == {"announced": 1}

    def test_an_ended_room_stays_ended(self, decode):
        decode.receiver.announce(1, "r", "p", 0, SLOTS)
        decode.hear(Done(room=1, generation=1, first_token=4))
        assert decode.receiver.poll() == [Ready(1, 4)]
        decode.hear(Done(room=1, generation=1, first_token=4))
        decode.hear(Quiet(room=1))
        decode.receiver.cancel(1, "late")
        decode.receiver.on_peer_lost("p")
        assert decode.receiver.poll() == []

    def test_a_declined_room_is_told_and_forgotten(self, decode):
        decode.receiver.decline(1, "r", "p")
        assert decode.out == [("p", Declined(room=1))]
        assert decode.receiver.counts() == {}
        assert decode.receiver.poll() == []

    def test_a_report_counts_fences_and_what_was_announced_again(self, decode):
        decode.receiver.announce(1, "r", "p", 2, SLOTS)
        decode.receiver.announce(2, "r", "other", 0, SLOTS)
        assert decode.receiver.report().held_pages == 8
        decode.receiver.on_peer_lost("p")
        decode.receiver.poll()
        report = decode.receiver.report()
        assert (report.fences, report.retries, report.failed) == (1, 1, {"peer_lost": 1})
        assert (report.prompt_tokens, report.delta_tokens, report.held_pages) == (10, 8, 4)

    def test_a_live_room_is_not_announced_twice(self, decode):
        decode.receiver.announce(1, "r", "p", 0, SLOTS)
        with pytest.raises(RequestError):
            decode.receiver.announce(1, "r", "p", 0, SLOTS)

    def test_what_cannot_be_read_is_the_links_end(self, decode):
        with pytest.raises(TransferError, match="peer p sent"):
            decode.receiver.on_message("p", b"")
