"""The two-minute form of ``make chaos``, and the parts of it that could hide a failure."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.dump import RoomView, SequenceView
from core.wire import RankId
from router.rpc.gen import antiphon_pb2 as pb
from tests.chaos import check, schedule
from tests.chaos.load import Ask, Got
from tests.chaos.phases import Leg, Phase, sight
from tests.chaos.report import coverage, failures
from tests.chaos.stage import Result
from tests.support.eventually import ROOT

SEED = 1
P, D = RankId(group="prefill"), RankId(group="decode", replica=1)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_nothing_is_lost_repeated_or_leaked_whatever_fails():
    words = [sys.executable, "-m", "tests.chaos", "--short", "--seed", str(SEED)]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stdout)
    assert done.returncode == 0, done.stdout
    assert " 0 problems" in done.stdout


def got(*tokens: int, status: str = "OK", finish: int = pb.FINISH_REASON_LENGTH) -> Got:
    stream = Got(Ask("a", (1, 2, 3), 4, 0))
    stream.tokens, stream.finish, stream.status = [list(tokens)], [finish], status
    stream.usage = (3, len(tokens))
    return stream


REFERENCE = got(7, 8, 9, 10)


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (got(7, 8, 9, 10), ""),
        (got(7, 8, 10), "token 2 is 10, not 9"),  # one lost
        (got(7, 8, 8, 9, 10), "token 2 is 8, not 9"),  # one repeated
        (got(7, 8, 9), "brought [3] of 4"),
        (got(7, 8, 9, 10, 11), "1 tokens too many"),
        (got(7, 8, 9, 10, status="UNAVAILABLE"), "ended with UNAVAILABLE"),
        (got(7, 8, 9, 10, finish=pb.FINISH_REASON_STOP), "finished with"),
    ],
)
def test_a_stream_is_compared_token_by_token(stream, problem):
    found = check.whole(stream, REFERENCE)
    assert problem in found
    assert bool(found) == bool(problem)


def test_a_wrong_usage_is_a_problem():
    stream = got(7, 8, 9, 10)
    stream.usage = (3, 5)
    assert "usage (3, 5)" in check.whole(stream, REFERENCE)


def leg(rank: RankId, state: str, *, computed: int = 0, output: int = 0, sent: int = 0) -> Leg:
    sequence = SequenceView(
        rid="r.0",
        router="a",
        state=state,
        prompt=100,
        output=output,
        computed=computed,
        cached=0,
        row=0,
        room=1,
        retractions=0,
        age_s=0,
    )
    room = RoomView(room=1, rid="r.0", phase="sending", peer="in1", sent=sent, computed=computed)
    return Leg(rank, sequence, room)


@pytest.mark.parametrize(
    ("legs", "phase"),
    [
        ([leg(P, "waiting"), leg(D, "awaiting_kv")], Phase.QUEUED),
        ([leg(P, "running", computed=64, sent=64), leg(D, "awaiting_kv")], Phase.PREFILLING),
        ([leg(P, "running", computed=64), leg(D, "awaiting_kv")], Phase.SENDING),
        ([leg(P, "sending", computed=100), leg(D, "awaiting_kv")], Phase.WAITING),
        ([leg(D, "running", output=20)], Phase.DECODING),
        ([leg(D, "running", output=2)], None),
        ([leg(P, "sending", computed=100), leg(D, "running", output=1)], None),
        ([], None),
    ],
)
def test_the_phase_of_a_request_is_what_its_ranks_say(legs, phase):
    seen = sight(legs, 1)
    assert (seen.phase if seen else None) is phase


def test_several_choices_are_decoding_when_all_are():
    two = [leg(D, "running", output=20)] * 2
    assert sight(two, 3) is None
    assert sight([*two, two[0]], 3).phase is Phase.SEVERAL


def test_the_short_form_has_every_kind_of_fault_and_the_long_one_everything():
    names = {event.name for event, _ in schedule.short(SEED, can_cut=True)}
    assert names == {name for name, _ in schedule.SHORT}
    cells = schedule.possible(can_cut=True)
    rounds = schedule.long(SEED, can_cut=True)
    assert {next(rounds) for _ in cells} == set(cells)
    assert not any(event.cuts for event, _ in schedule.possible(can_cut=False))


def test_the_report_shows_what_failed_and_what_was_never_reached():
    good = Result("abort by id", Phase.QUEUED, Phase.QUEUED)
    bad = Result("abort by id", Phase.WAITING, Phase.WAITING, problems=["a token is missing"])
    missed = Result("abort by id", Phase.DECODING)
    shown = coverage([good, bad, missed])
    (row,) = [line for line in shown.splitlines() if "abort by id" in line]
    assert [word.strip() for word in row.split("|")[2:8]] == [
        "1", "-", "-", "1 of 1 FAILED", "missed", "-",
    ]  # fmt: skip
    assert failures([good, bad]) == ["abort by id, waiting (seen: waiting): a token is missing"]


def test_descriptors_may_grow_by_what_a_rank_opens_at_first_use():
    life = "decode/0"
    table = check.Descriptors()
    assert not table.took({life: 30})
    assert not table.took({life: 30 + check.IN_USE})
    life_grew = table.took({life: 31 + check.IN_USE})
    assert len(life_grew) == 1
