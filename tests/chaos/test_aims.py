"""What a fault is aimed at, and what it then counts for."""

from __future__ import annotations

import random

import pytest

from core.wire import RankId
from router.rpc.gen import antiphon_pb2 as pb
from tests.chaos import check, probes
from tests.chaos.aims import Aim, best
from tests.chaos.events import DEADLINE, EVENTS
from tests.chaos.load import Ask, Got
from tests.chaos.phases import Phase, Sighting, covered
from tests.chaos.scene import Scene

P0, P1 = (RankId(group="prefill", replica=r) for r in range(2))
D0, D1 = (RankId(group="decode", replica=r) for r in range(2))
DRAW = random.Random(1)
ALL = frozenset(Phase)


def seen(phase: Phase, prefill: RankId | None, decode: RankId, prompt: int = 0) -> Sighting:
    return Sighting(phase, prefill, decode, prompt=prompt)


SENDING = [seen(Phase.SENDING, p, D0, i) for i, p in enumerate((P0, P1))]


@pytest.mark.parametrize(
    ("wanted", "hit", "phases"),
    [
        (Phase.SENDING, SENDING[:1], {Phase.SENDING}),
        (Phase.PREFILLING, SENDING[:1], {Phase.PREFILLING}),  # one request, one phase
        (Phase.SENDING, SENDING, {Phase.SENDING, Phase.PREFILLING}),
        (Phase.PREFILLING, SENDING, {Phase.SENDING, Phase.PREFILLING}),
        (Phase.DECODING, [seen(Phase.DECODING, None, D0), SENDING[0]],
         {Phase.DECODING, Phase.SENDING}),
        (Phase.DECODING, [seen(Phase.DECODING, None, D0), *SENDING],
         {Phase.DECODING, Phase.SENDING, Phase.PREFILLING}),
    ],
)  # fmt: skip
def test_each_request_counts_for_one_phase(wanted, hit, phases):
    assert covered(wanted, hit[0], hit) == phases


@pytest.mark.parametrize(
    ("aim", "counted"),
    [
        (Aim.PREFILL, {Phase.QUEUED, Phase.WAITING, Phase.DECODING, Phase.SEVERAL}),
        (Aim.DECODE, {Phase.QUEUED, Phase.SENDING, Phase.DECODING}),
        (Aim.LINK, {Phase.QUEUED, Phase.DECODING}),  # both ends
        (Aim.BOTH, ALL - {Phase.PREFILLING, Phase.SEVERAL}),
        (Aim.EVERYTHING, ALL - {Phase.PREFILLING}),
        (Aim.CALLER, {Phase.QUEUED, Phase.WAITING}),  # the stage's own
    ],
)
def test_only_what_is_struck_counts(aim, counted):
    crowd = [
        seen(Phase.QUEUED, P0, D0, 1),
        seen(Phase.WAITING, P0, D1, 2),
        seen(Phase.SENDING, P1, D0, 3),
        seen(Phase.DECODING, None, D0, 4),
        seen(Phase.SEVERAL, None, D1, 5),
    ]
    assert best(aim, Phase.QUEUED, crowd, {1, 2}, ALL, DRAW).covers == counted


def test_of_several_victims_the_one_is_struck_that_covers_most_of_what_is_short():
    crowd = [
        seen(Phase.QUEUED, P0, D0, 1),
        seen(Phase.WAITING, P0, D0, 2),
        seen(Phase.QUEUED, P1, D1, 3),
        seen(Phase.SENDING, P1, D1, 4),
    ]
    own = {1, 2, 3, 4}
    for short, prefill in (({Phase.SENDING}, P1), ({Phase.WAITING}, P0)):
        shot = best(Aim.PREFILL, Phase.QUEUED, crowd, own, short, DRAW)
        assert shot.rank("prefill") == prefill


def test_what_may_strike_either_role_strikes_the_one_that_covers_more():
    crowd = [seen(Phase.QUEUED, P0, D0, 1), seen(Phase.SENDING, P1, D0, 2)]
    shot = best(Aim.EITHER, Phase.QUEUED, crowd, {1}, ALL, DRAW)
    assert shot.role == "decode"
    assert shot.rank(shot.role) == D0


def test_a_request_past_its_prefill_rank_is_aimed_at_with_the_one_that_hits_others():
    crowd = [seen(Phase.DECODING, None, D0, 1), seen(Phase.WAITING, P1, D1, 2)]
    shot = best(Aim.PREFILL, Phase.DECODING, crowd, {1}, ALL, DRAW)
    assert shot.rank("prefill") == P1
    assert shot.covers == {Phase.DECODING, Phase.WAITING}


def test_nothing_is_struck_while_no_request_of_the_stage_is_in_the_phase():
    crowd = [seen(Phase.QUEUED, P0, D0, 1), seen(Phase.WAITING, P0, D0, 2)]
    assert best(Aim.PREFILL, Phase.QUEUED, crowd, {2}, ALL, DRAW) is None


@pytest.mark.parametrize(
    ("aimed", "other", "needed"),
    [
        (Phase.QUEUED, Phase.DECODING, True),
        (Phase.DECODING, Phase.DECODING, False),
        (Phase.DECODING, Phase.QUEUED, True),
    ],
)
def test_a_stream_has_to_be_carried_on_where_one_is_held_up(aimed, other, needed):
    crowd = [seen(aimed, P0, D0, 1), seen(other, P0, D1, 2)]
    shot = best(Aim.PREFILL, aimed, crowd, {1}, ALL, DRAW)
    struck = {2: Got(Ask("a", (1, 2), 4, 0))}
    scene = Scene(None, None, DRAW, shot, struck, None)
    assert scene.held_up_by(P0, session=True) is needed


def probe(status: str, deadline: float, seen_at: float) -> probes.Probe:
    got = Got(Ask("a", (1, 2, 3), 4, 0), status=status)
    return probes.Probe(got, None, deadline, seen(Phase.QUEUED, P0, D0), seen_at)


def test_a_deadline_counts_in_a_phase_seen_just_before_it():
    late = "DEADLINE_EXCEEDED"
    assert probes.passed(probe(late, 10.0, 9.9))
    assert not probes.passed(probe(late, 10.0, 9.0))
    assert not probes.passed(probe("OK", 10.0, 9.9))


def test_writes_are_held_where_they_must_be_or_where_that_covers_more():
    draw = random.Random(1)

    def often(aim: Aim, wanted: Phase, short: frozenset[Phase]) -> set[bool]:
        return {probes.holds(aim, wanted, short, draw) for _ in range(100)}

    nothing = frozenset[Phase]()
    assert (
        often(Aim.DECODE, Phase.SENDING, nothing) == often(Aim.LINK, Phase.WAITING, ALL) == {True}
    )
    assert often(Aim.DECODE, Phase.QUEUED, ALL) == {True}
    assert often(Aim.DECODE, Phase.QUEUED, nothing) == {False}
    assert often(Aim.DECODE, Phase.PREFILLING, ALL) == {True, False}
    assert often(Aim.PREFILL, Phase.PREFILLING, ALL) == {False}


def test_a_shot_waits_only_for_phases_that_can_come():
    assert Phase.PREFILLING not in probes.attainable(Aim.PREFILL, Phase.QUEUED, held=True)
    assert Phase.PREFILLING in probes.attainable(Aim.DECODE, Phase.QUEUED, held=True)
    assert Phase.WAITING not in probes.attainable(Aim.DECODE, Phase.PREFILLING, held=False)


def test_a_request_that_was_in_no_clear_phase_may_have_come_to_its_end_only_where_it_was_struck():
    ask = Ask("a", (1, 2, 3), 1, 0)
    whole = Got(ask, usage=(3, 1), status="OK")
    whole.tokens, whole.finish = [[7]], [pb.FINISH_REASON_LENGTH]
    late = Got(ask, status="DEADLINE_EXCEEDED")
    by_name = {event.name: event.unclear for event in EVENTS}
    for end, problems in ((whole, False), (late, False), (Got(ask, status="UNAVAILABLE"), True)):
        assert bool(by_name[DEADLINE](end, whole)) is problems
    assert by_name["abort by id"](late, whole)
    assert by_name["decode killed"](late, whole)
    full = Got(ask, status="RESOURCE_EXHAUSTED", words="no place")
    burst = next(event for event in EVENTS if event.name.startswith("burst"))
    assert not burst.unclear(full, whole)
    assert burst.verdict(full, whole)
    assert check.whole(whole, whole) == ""
