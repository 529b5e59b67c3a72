"""Heartbeats that echo, in time that the test tells."""

from __future__ import annotations

import msgspec
import pytest

from core.codec import to_rank_codec, to_router_codec
from core.lease import SLACK_S
from core.rpc.beats import MARK, Beats
from core.wire import LoadReport, Ping, StepReport
from disagg.messages import Cancel, Quiet, to_decode_codec, to_prefill_codec

LIMIT_S = 4.5
EVERY_S = 1.0


class Pair:
    """Two ends that beat every second; a frame is lost where its direction is cut."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends = [Beats(0.0), Beats(0.0)]
        self.cut = [False, False]  # what end i sends is lost
        self.silences = [0.0, 0.0]

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += EVERY_S
            for sender, end in enumerate(self.ends):
                self.silences[sender] = end.silence_s(self.now, EVERY_S)
                end.begin(self.now)
                self.send(sender)

    def send(self, sender: int) -> None:
        """What is sent arrives at once."""
        if not self.cut[sender] and self.ends[1 - sender].hear(self.ends[sender].frame()):
            self.send(1 - sender)


def test_while_both_directions_work_silence_is_no_longer_than_a_beat():
    pair = Pair()
    pair.run(100)
    assert pair.silences == [EVERY_S, EVERY_S]


@pytest.mark.parametrize("deaf", [0, 1])
def test_both_ends_count_from_the_moment_one_direction_is_lost(deaf):
    pair = Pair()
    pair.run(10)
    pair.cut[1 - deaf] = True
    pair.run(5)
    assert pair.silences == [5 * EVERY_S, 5 * EVERY_S]


def test_what_is_answered_late_counts_from_when_it_was_sent():
    here, there = Beats(0.0), Beats(0.0)
    here.begin(1.0)
    late = here.frame()
    here.begin(2.0)
    assert here.silence_s(3.0, 3.0) == 3.0
    assert there.hear(late)
    assert not here.hear(there.frame())  # an answer is not answered
    assert here.silence_s(4.0, 1.0) == 3.0
    there.hear(here.frame())
    here.hear(there.frame())
    assert here.silence_s(4.0, 0.0) == 2.0


def test_an_end_that_beats_and_never_hears_is_silent():
    here, deaf = Beats(0.0), Beats(0.0)
    for second in range(1, 6):
        here.begin(float(second))
        deaf.begin(float(second))
        assert here.hear(deaf.frame())
    assert here.silence_s(5.0, 5.0) == 5.0


def test_the_time_in_which_this_process_stood_still_does_not_count():
    here, there = Beats(0.0), Beats(0.0)
    here.begin(1.0)
    assert here.silence_s(2.0, 2.0) == 2.0
    assert here.silence_s(63.0, 1.0) == 3.0, "it slept for 60 s"
    there.hear(here.frame())
    here.hear(there.frame())  # waited in a socket meanwhile
    assert here.silence_s(63.0, 0.0) == 2.0
    assert here.silence_s(64.0 + SLACK_S, 1.0) == 3.0 + SLACK_S, "being late by little is no sleep"


@pytest.mark.parametrize("frame", [MARK, MARK + b"\0" * 15, MARK + b"\0" * 17])
def test_what_only_begins_like_a_beat_is_malformed(frame):
    with pytest.raises(msgspec.ValidationError, match="not a heartbeat"):
        Beats(0.0).hear(frame)


def test_no_message_begins_like_a_beat():
    report = StepReport(chunks=(), load=LoadReport())
    frames = (
        to_rank_codec().encode(Ping()),
        to_router_codec().encode(report),
        to_prefill_codec().encode(Cancel(room=1)),
        to_decode_codec().encode(Quiet(room=1)),
    )
    assert all(frame[:1] != MARK for frame in frames)
    for value in ({}, [], "", b"", 0, -1, None, True, 1.5):
        assert msgspec.msgpack.encode(value)[:1] != MARK
