from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.rpc.service import STOPPING
from core.wire import RankId, Role
from router.replicas import Member, MemberState, Replicas, Retry
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_ranks import Fleet

AT_ONCE = Retry(first_s=0.0, limit_s=0.0)


@asynccontextmanager
async def watching(fleet: Fleet) -> AsyncIterator[Replicas]:
    replicas = Replicas(fleet.connect, retry=AT_ONCE)
    replicas.update(fleet.members)
    yield replicas
    await replicas.close()
    assert not fleet.live


def test_a_pair_is_complete_and_half_a_pair_is_not():
    async def main() -> None:
        fleet = Fleet()
        fleet.add(Role.PREFILL)
        async with watching(fleet) as replicas:
            await eventually(lambda: replicas.routable(Role.PREFILL))
            assert not replicas.complete
            fleet.add(Role.DECODE)
            replicas.update(fleet.members)
            await eventually(lambda: replicas.complete)
            assert len(fleet.clients) == 2  # the first session was left alone

    run_tidy(main)


def test_one_unified_rank_is_complete():
    async def main() -> None:
        fleet = Fleet()
        fleet.add(Role.UNIFIED)
        async with watching(fleet) as replicas:
            assert replicas.any_member
            assert not replicas.complete
            change = replicas.change()
            await asyncio.wait_for(change.wait(), 5)
            assert replicas.complete

    run_tidy(main)


def test_a_lost_session_is_out_at_once_and_comes_back_empty():
    async def main() -> None:
        fleet = Fleet()
        fleet.add(Role.UNIFIED)
        async with watching(fleet) as replicas:
            await eventually(lambda: replicas.complete)
            (before,) = replicas.routable(Role.UNIFIED)
            booking = before.book(10)
            fleet.down.add(before.rank)
            fleet.live[0].lose()
            assert not replicas.complete
            attempts = fleet.attempts
            await eventually(lambda: fleet.attempts > attempts + 3)
            assert replicas.members() == [(fleet.members[0], None)]
            fleet.down.clear()
            await eventually(lambda: replicas.complete)
            (after,) = replicas.routable(Role.UNIFIED)
            assert after is not before
            assert after.outstanding_tokens == 0
            booking.release()
            assert after.outstanding_tokens == 0

    run_tidy(main)


def test_another_incarnation_replaces_the_session():
    async def main() -> None:
        fleet = Fleet()
        old = fleet.add(Role.UNIFIED, nonce="old")
        async with watching(fleet) as replicas:
            await eventually(lambda: replicas.complete)
            new = fleet.add(Role.UNIFIED, nonce="new")
            replicas.update(fleet.members)
            assert not replicas.complete
            await eventually(lambda: replicas.complete)
            (replica,) = replicas.routable(Role.UNIFIED)
            assert replica.client.incarnation == new.incarnation
            assert [c.incarnation for c in fleet.live] == [new.incarnation]
            assert old.incarnation not in [c.incarnation for c in fleet.live]

    run_tidy(main)


def test_a_rank_that_left_is_closed_and_not_tried_again():
    async def main() -> None:
        fleet = Fleet()
        fleet.add(Role.PREFILL)
        fleet.add(Role.DECODE)
        async with watching(fleet) as replicas:
            await eventually(lambda: replicas.complete)
            replicas.update(fleet.members[:1])
            assert not replicas.routable(Role.DECODE)
            await eventually(lambda: len(fleet.live) == 1)
            replicas.update([])
            assert not replicas.any_member
            await eventually(lambda: not fleet.live)
            assert fleet.attempts == 2

    run_tidy(main)


def test_ranks_to_avoid_are_taken_when_nothing_else_is_left():
    async def main() -> None:
        fleet = Fleet()
        fleet.add(Role.DECODE, 0)
        fleet.add(Role.DECODE, 1)
        async with watching(fleet) as replicas:
            await eventually(lambda: len(replicas.routable(Role.DECODE)) == 2)
            zero, one = (RankId(group="decode", replica=i) for i in range(2))
            assert [r.rank for r in replicas.routable(Role.DECODE, {zero})] == [one]
            assert len(replicas.routable(Role.DECODE, {zero, one})) == 2

    run_tidy(main)


def test_bookings_count_and_are_released_once():
    async def main() -> None:
        fleet = Fleet()
        fleet.add(Role.UNIFIED)
        async with watching(fleet) as replicas:
            await eventually(lambda: replicas.complete)
            (replica,) = replicas.routable(Role.UNIFIED)
            first, second = replica.book(10), replica.book(5)
            assert (replica.outstanding_tokens, replica.outstanding_requests) == (15, 2)
            first.release()
            first.release()
            assert (replica.outstanding_tokens, replica.outstanding_requests) == (5, 1)
            second.release()
            assert (replica.outstanding_tokens, replica.outstanding_requests) == (0, 0)

    run_tidy(main)


def test_a_defect_in_connecting_is_seen(caplog):
    async def broken(life, on_lost):
        raise ZeroDivisionError

    async def main() -> None:
        fleet = Fleet()
        fleet.add(Role.UNIFIED)
        replicas = Replicas(broken, retry=AT_ONCE)
        replicas.update(fleet.members)
        with caplog.at_level(logging.ERROR):
            await eventually(lambda: "no longer connected" in caplog.text)
        await replicas.close()

    run_tidy(main)


@pytest.mark.parametrize(
    ("state", "reason", "level"),
    [
        (MemberState.SERVING, "silent for 8 s", logging.WARNING),
        (MemberState.DRAINING, "silent for 8 s", logging.INFO),
        (MemberState.SERVING, f"ABORTED: session ended: {STOPPING}", logging.INFO),
    ],
)
def test_a_loss_is_a_warning_unless_it_was_to_be_expected(caplog, state, reason, level):
    caplog.set_level(logging.INFO, "router.replicas")

    async def main() -> None:
        fleet = Fleet()
        member = fleet.add(Role.UNIFIED)
        async with watching(fleet) as replicas:
            await eventually(lambda: replicas.complete)
            replicas.update([Member(member.incarnation, member.role, state)])
            fleet.down.add(member.incarnation.rank)
            fleet.live[0].lose(reason)
            await eventually(lambda: "is lost" in caplog.text)

    run_tidy(main)
    (record,) = [r for r in caplog.records if "is lost" in r.getMessage()]
    assert record.levelno == level
    assert record.getMessage().endswith(f"is lost: {reason}")


def test_why_there_is_no_session_is_known_while_there_is_none():
    async def main() -> None:
        fleet = Fleet()
        rank = fleet.add(Role.UNIFIED).incarnation.rank
        async with watching(fleet) as replicas:
            assert replicas.problem(rank) == ""
            await eventually(lambda: replicas.complete)
            fleet.down.add(rank)
            fleet.live[0].lose("silent for 8 s")
            await eventually(lambda: replicas.problem(rank) == "nobody there")
            fleet.down.clear()
            await eventually(lambda: replicas.complete)
            assert replicas.problem(rank) == ""

    run_tidy(main)
