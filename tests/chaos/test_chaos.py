"""The two-minute form of ``make chaos``, and the parts of it that could hide a failure."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from core.dump import RoomView, SequenceView
from core.wire import RankId
from router.rpc.gen import antiphon_pb2 as pb
from tests.chaos import check, descriptors, report, schedule
from tests.chaos.hosts import Hosts
from tests.chaos.load import Ask, Got
from tests.chaos.phases import Leg, Phase, Sighting, sight
from tests.chaos.stage import Result
from tests.support.eventually import ROOT, eventually

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


def leg(
    rank: RankId, state: str, *, computed: int = 0, output: int = 0, sent: int = 0, rid: str = "r.0"
) -> Leg:
    sequence = SequenceView(
        rid=rid,
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
    room = RoomView(room=1, rid=rid, phase="sending", peer="in1", sent=sent, computed=computed)
    return Leg(rank, sequence, room)


ONE = Ask("one", (1,) * 100, 100, 0)
THREE = Ask("three", (1,) * 100, 100, 0, 3)


@pytest.mark.parametrize(
    ("legs", "phase"),
    [
        ([leg(P, "waiting"), leg(D, "awaiting_kv")], Phase.QUEUED),
        ([leg(P, "running", computed=64, sent=64), leg(D, "awaiting_kv")], Phase.PREFILLING),
        ([leg(P, "running", computed=64), leg(D, "awaiting_kv")], Phase.SENDING),
        ([leg(P, "sending", computed=100), leg(D, "awaiting_kv")], Phase.WAITING),
        ([leg(D, "running", output=20)], Phase.DECODING),
        ([leg(D, "running", output=2)], None),
        ([leg(D, "running", output=90)], None),  # it may end before anything strikes it
        ([leg(P, "sending", computed=100), leg(D, "running", output=1)], None),
        ([], None),
    ],
)
def test_the_phase_of_a_request_is_what_its_ranks_say(legs, phase):
    seen = sight(legs, ONE)
    assert (seen.phase if seen else None) is phase


def test_several_choices_are_decoding_when_all_are():
    two = [leg(D, "running", output=20)] * 2
    assert sight(two, THREE) is None
    other = leg(RankId(group="decode"), "running", output=20)
    seen = sight([*two, other], THREE)
    assert (seen.phase, seen.decode) == (Phase.SEVERAL, D)
    assert seen.hit({other.rank})  # one choice is


HOSTS = Hosts("lab", ("head",), loss="nft")


def test_the_short_form_has_every_kind_of_fault():
    names = {event.name for event, _ in schedule.short(SEED, HOSTS)}
    assert names == {name for name, _ in schedule.SHORT}


def test_what_the_hosts_cannot_do_is_not_played_and_named():
    assert not schedule.absent(HOSTS)
    flat = Hosts(problem="network namespaces need root")
    assert not any(event.needs for event, _ in schedule.possible(flat))
    shown = "\n".join(report.short_of(0, [], flat))
    assert "lossy link, because network namespaces need root" in shown
    calm = Hosts("lab", ("head",), loss_problem="nft is not installed")
    assert schedule.absent(calm) == {"lossy link": "nft is not installed"}


def played(event: str, phase: Phase, *others: Phase, **more) -> Result:
    return Result(event, phase, phase, hits=frozenset([phase, *others]), **more)


def test_the_long_form_plays_what_was_played_least_until_all_was_played_often_enough():
    cells, results = schedule.possible(HOSTS), list[Result]()
    for number, (event, phase) in enumerate(schedule.steered(cells, results, SEED)):
        assert schedule.counts(results)[event.name, phase] == number // len(cells)
        results.append(played(event.name, phase))
    assert len(results) == schedule.GOAL * len(cells)
    assert not report.short_of(schedule.GOAL, results, HOSTS)


def test_a_phase_that_is_never_seen_is_given_up_and_named():
    cells = [c for c in schedule.possible(HOSTS, "abort by id") if c[1] is Phase.QUEUED]
    results = list[Result]()
    for event, phase in schedule.steered(cells, results, SEED):
        results.append(Result(event.name, phase))
    assert len(results) == schedule.MISSES
    shown = "\n".join(report.short_of(1, results, HOSTS))
    assert f"abort by id, queued: not seen in the last {schedule.MISSES} tries" in shown


def test_an_event_counts_in_every_phase_in_which_it_struck_a_request():
    both = played("decode killed", Phase.SENDING, Phase.DECODING, Phase.SENDING)
    done = schedule.counts([both, both])
    assert done == {("decode killed", p): 2 for p in (Phase.SENDING, Phase.DECODING)}


@pytest.mark.parametrize(
    ("seen", "struck", "hit"),
    [
        (Sighting(Phase.SENDING, P, D), {P}, True),
        (Sighting(Phase.SENDING, P, D), {RankId(group="prefill", replica=1)}, False),
        (Sighting(Phase.DECODING, None, D), {D}, True),
        (Sighting(Phase.DECODING, None, D), {RankId(group="decode")}, False),
        (Sighting(Phase.DECODING, None, D), {P}, True),  # must not be disturbed
    ],
)
def test_a_request_is_struck_where_its_rank_is_or_its_role_is_past(seen, struck, hit):
    assert seen.hit(struck) is hit


def test_the_cell_that_is_played_is_of_the_event_that_needs_it_most():
    cells = schedule.possible(HOSTS, "decode killed,abort by id")
    results = [played("decode killed", Phase.QUEUED, *[p for p in Phase if p != Phase.WAITING])]
    for seed in range(50):
        event, _ = next(schedule.steered(cells, results, seed))
        assert event.name == "abort by id"
    short = schedule.short_phases(results * schedule.GOAL, "decode killed")
    assert short == {Phase.WAITING}


def test_the_report_shows_what_failed_and_what_was_never_reached():
    good = played("abort by id", Phase.QUEUED)
    bad = played("abort by id", Phase.WAITING, problems=["a token is missing"])
    missed = Result("abort by id", Phase.DECODING)
    shown = report.coverage([good, bad, missed])
    (row,) = [line for line in shown.splitlines() if "abort by id" in line]
    assert [word.strip() for word in row.split("|")[2:8]] == [
        "1", "-", "-", "1 of 1 FAILED", "missed", "-",
    ]  # fmt: skip
    failed = report.failures([good, bad])
    assert failed == ["abort by id, waiting (seen: waiting): a token is missing"]


def test_the_report_names_the_longest_detection_of_a_silent_loss():
    slow = played("prefill killed", Phase.QUEUED, notes={"noticed": 9.0})
    cut = played("decode cut off and healed", Phase.SENDING, notes={"noticed": 4.6})
    quick = played("one way: router to rank", Phase.QUEUED, notes={"rerouted": 4.7, "noticed": 1})
    shown = report.detection([slow, cut, quick])
    assert "noticed after 4.60 s (decode cut off and healed, sending)" in shown
    assert "rerouted after 4.70 s (one way: router to rank, queued)" in shown


def test_a_connection_counts_that_the_peer_has_closed_and_we_have_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        before = descriptors.half_closed(os.getpid())
        peer.close()
        asyncio.run(eventually(lambda: len(descriptors.half_closed(os.getpid())) > len(before)))
        ours.close()
        assert descriptors.half_closed(os.getpid()) == before


def test_descriptors_may_grow_by_what_a_rank_opens_at_first_use():
    life = "decode/0"
    table = check.Descriptors()
    assert not table.took({life: 30})
    assert not table.took({life: 30 + check.IN_USE})
    life_grew = table.took({life: 31 + check.IN_USE})
    assert len(life_grew) == 1
