"""The dispatcher over fake ranks: single cases, then random orders and losses."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from core.errors import Unavailable
from core.wire import ErrorKind, FinishReason, Role, SamplingParams, TokenChunk, Usage
from tests.support.eventually import eventually, run_tidy
from tests.support.fake_ranks import Fleet, token_at
from tests.support.fronts import PROMPT, front, release_all, settle, tokens

PAIR = (Role.PREFILL, Role.DECODE)


def reference(count: int) -> list[int]:
    return [token_at(PROMPT, offset) for offset in range(count)]


@pytest.mark.parametrize("roles", [PAIR, (Role.UNIFIED,)])
def test_a_request_runs_through_its_legs(roles):
    async def main() -> None:
        async with front(*roles) as it:
            task = asyncio.create_task(it.collect(7))
            await settle()
            assert sum(len(c.legs) for c in it.fleet.live) == len(roles)
            requests = [leg.request for c in it.fleet.live for leg in c.legs]
            assert len({r.route.room for r in requests}) == 1
            assert requests[0] == requests[-1]
            await release_all(it.fleet)
            chunks = await task
            assert tokens(chunks) == reference(7)
            assert chunks[-1].finish is FinishReason.LENGTH
            said = [c.usage for c in chunks if c.usage is not None]
            assert said == [chunks[0].usage] == [Usage(prompt_tokens=5, cached_tokens=2)]
            assert not any(c.aborted for c in it.fleet.clients)

    run_tidy(main)


def test_prefill_work_is_released_at_the_first_token():
    async def main() -> None:
        async with front(*PAIR) as it:
            (prefill,) = it.replicas.routable(Role.PREFILL)
            (decode,) = it.replicas.routable(Role.DECODE)
            task = asyncio.create_task(it.collect(3))
            await settle()
            assert (prefill.outstanding_tokens, decode.outstanding_tokens) == (5, 8)
            it.fleet.client(Role.PREFILL).legs[0].release()
            await settle()
            assert (prefill.outstanding_tokens, decode.outstanding_tokens) == (0, 8)
            await release_all(it.fleet)
            await task

    run_tidy(main)


def test_a_decode_rank_that_computes_the_prompt_itself_needs_no_prefill_leg():
    async def main() -> None:
        async with front(*PAIR, fleet=Fleet(local=lambda: True)) as it:
            (prefill,) = it.replicas.routable(Role.PREFILL)
            (decode,) = it.replicas.routable(Role.DECODE)
            task = asyncio.create_task(it.collect(5))
            await settle()
            client = it.fleet.client(Role.DECODE)
            client.legs[0].release()
            await settle()
            assert prefill.outstanding_tokens == 0, "released with the first token"
            assert decode.outstanding_tokens == 10
            it.fleet.lose(it.fleet.client(Role.PREFILL))
            await settle()
            it.remember()
            await release_all(it.fleet)
            chunks = await task
            assert tokens(chunks) == reference(5)
            assert chunks[0].usage == Usage(prompt_tokens=5, cached_tokens=2)
            assert not client.aborted

    run_tidy(main)


def test_a_prefill_leg_that_was_not_told_is_aborted_when_the_answer_is_there():
    async def main() -> None:
        async with front(*PAIR, fleet=Fleet(local=lambda: True)) as it:
            task = asyncio.create_task(it.collect(3))
            await settle()
            prefill = it.fleet.client(Role.PREFILL)
            prefill.legs[0].plan[:] = [
                TokenChunk(rid="r.0", offset=0, token_ids=tuple(reference(1)), last=True)
            ]
            await release_all(it.fleet)
            assert tokens(await task) == reference(3)
            assert prefill.aborted == ["r.0"]

    run_tidy(main)


def test_concurrent_requests_spread():
    async def main() -> None:
        async with front(Role.UNIFIED, Role.UNIFIED) as it:
            both = [asyncio.create_task(it.collect(2)) for _ in range(4)]
            await settle()
            assert [len(c.legs) for c in it.fleet.live] == [2, 2]
            await release_all(it.fleet)
            await asyncio.gather(*both)

    run_tidy(main)


def test_an_output_that_ends_at_its_first_token_aborts_the_decode_leg():
    async def main() -> None:
        async with front(*PAIR, fleet=Fleet(stop_after=1)) as it:
            decode = it.fleet.client(Role.DECODE)
            task = asyncio.create_task(it.collect(7))
            await settle()
            it.fleet.client(Role.PREFILL).legs[0].release()
            chunks = await task
            assert tokens(chunks) == reference(1)
            assert chunks[-1].finish is FinishReason.STOP
            assert decode.aborted == ["r.0"]

    run_tidy(main)


def test_a_decode_leg_that_has_nothing_to_do_ends_before_the_token_comes():
    async def main() -> None:
        async with front(*PAIR) as it:
            task = asyncio.create_task(it.collect(1))
            await settle()
            it.fleet.client(Role.DECODE).legs[0].release()
            await settle()
            it.fleet.client(Role.PREFILL).legs[0].release()
            assert tokens(await task) == reference(1)

    run_tidy(main)


@pytest.mark.parametrize("role", PAIR)
def test_a_leg_error_ends_the_stream_and_the_other_leg(role):
    async def main() -> None:
        async with front(*PAIR) as it:
            task = asyncio.create_task(it.collect(3))
            await settle()
            leg = it.fleet.client(role).legs[0]
            leg.arrived.put_nowait(leg.error(ErrorKind.INVALID))
            (end,) = await task
            assert end.finish is FinishReason.ERROR
            assert end.error is not None
            assert end.error.kind is ErrorKind.INVALID
            (other,) = set(PAIR) - {role}
            assert it.fleet.client(other).aborted == ["r.0"]

    run_tidy(main)


@pytest.mark.parametrize("leave", ["aclose", "cancel"])
def test_leaving_early_aborts_every_leg(leave):
    async def main() -> None:
        async with front(*PAIR) as it:
            clients = list(it.fleet.live)
            if leave == "cancel":
                task = asyncio.create_task(it.collect(3))
                await settle()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert [c.aborted for c in clients] == [["r.0"], ["r.0"]]
            else:
                params = SamplingParams(max_new_tokens=3)
                stream = it.dispatcher.stream("r", PROMPT, params)
                first = asyncio.ensure_future(anext(stream))
                await settle()
                clients[0].legs[0].release()
                await first
                await stream.aclose()
                assert clients[1].aborted == ["r.0"]
                assert clients[0].aborted == ["r.0"], "it said all, and still holds the KV"

    run_tidy(main)


def test_a_lost_decode_rank_is_replaced_by_another_one():
    async def main() -> None:
        async with front(Role.PREFILL, Role.DECODE, Role.DECODE) as it:
            task = asyncio.create_task(it.collect(6))
            await settle()
            busy = next(c for c in it.fleet.live if c.info.role is Role.DECODE and c.legs)
            it.fleet.client(Role.PREFILL).legs[0].release()
            busy.legs[0].release()
            await settle()
            busy.lose()
            await settle()
            it.remember()
            (leg,) = (leg for c in it.fleet.live if c.info.role is Role.DECODE for leg in c.legs)
            assert leg.request.route.decode.rank != busy.incarnation.rank
            assert leg.request.rid == "r.1"
            assert it.fleet.client(Role.PREFILL).aborted == ["r.0"]
            assert len(leg.request.ids()) > leg.request.prompt_len == len(PROMPT)
            await release_all(it.fleet)
            assert tokens(await task) == reference(6)

    run_tidy(main)


def test_every_attempt_has_the_salt_of_its_request():
    async def main() -> None:
        async with front(Role.PREFILL, Role.DECODE, Role.DECODE) as it:
            task = asyncio.create_task(it.collect(6, salt="mine"))
            await settle()
            assert {leg.request.cache_salt for c in it.fleet.live for leg in c.legs} == {"mine"}
            next(c for c in it.fleet.live if c.info.role is Role.DECODE and c.legs).lose()
            await settle()
            it.remember()
            again = [leg.request for c in it.fleet.live for leg in c.legs]
            assert {(r.rid, r.cache_salt) for r in again} == {("r.1", "mine")}
            await release_all(it.fleet)
            assert tokens(await task) == reference(6)

    run_tidy(main)


def test_the_only_rank_is_waited_for():
    async def main() -> None:
        async with front(Role.UNIFIED) as it:
            task = asyncio.create_task(it.collect(4))
            await settle()
            (old,) = it.fleet.live
            it.fleet.down.add(old.incarnation.rank)
            old.lose()
            await settle()
            assert not task.done()
            it.fleet.down.clear()
            await eventually(lambda: it.fleet.live and it.fleet.live[0].legs)
            it.remember()
            await release_all(it.fleet)
            assert tokens(await task) == reference(4)

    run_tidy(main)


def test_a_stream_that_finds_no_other_rank_in_time_says_so():
    async def main() -> None:
        async with front(Role.UNIFIED, wait_s=0.05) as it:
            task = asyncio.create_task(it.collect(4))
            await settle()
            it.fleet.live[0].legs[0].release()
            it.replicas.update([])
            chunks = await task
            found = tokens(chunks)
            assert found == reference(len(found)) != []
            assert chunks[-1].error is not None
            assert chunks[-1].error.kind is ErrorKind.UNAVAILABLE
            assert "within 0.05 s" in chunks[-1].error.message

    run_tidy(main)


def test_no_member_at_all_is_unavailable_at_once_and_a_missing_half_after_a_while():
    async def main() -> None:
        async with front(wait_s=60.0) as it:
            with pytest.raises(Unavailable, match="no worker is known"):
                await it.collect(3)
        async with front(Role.PREFILL, wait_s=0.02) as it:
            with pytest.raises(Unavailable, match=r"no complete route within 0\.02 s"):
                await it.collect(3)

    run_tidy(main)


def test_a_missing_offset_is_a_defect_not_a_hang():
    async def main() -> None:
        async with front(*PAIR) as it:
            task = asyncio.create_task(it.collect(3))
            await settle()
            prefill, decode = (it.fleet.client(role).legs[0] for role in PAIR)
            length = FinishReason.LENGTH
            decode.arrived.put_nowait(
                TokenChunk(rid="r.0", offset=1, token_ids=(1, 2), finish=length)
            )
            await settle()
            prefill.arrived.put_nowait(TokenChunk(rid="r.0", offset=0, last=True))
            (end,) = await task
            assert end.error is not None
            assert end.error.kind is ErrorKind.INTERNAL

    run_tidy(main)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),  # hypothesis cannot be asked for more from inside tasks
    counts=st.sampled_from([(1, 1, 0), (2, 3, 0), (0, 0, 1), (0, 0, 3)]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    stop_after=st.none() | st.integers(1, 9),
    losses=st.integers(0, 5),
    local=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_order_and_any_losses_give_the_reference(
    seed, counts, lengths, stop_after, losses, local
):
    roles = [r for role, n in zip((*PAIR, Role.UNIFIED), counts, strict=True) for r in [role] * n]

    async def main() -> None:
        random = Random(seed)
        fleet = Fleet(random, stop_after=stop_after, local=lambda: random.random() < local)
        async with front(*roles, fleet=fleet) as it:
            tasks = [asyncio.create_task(it.collect(n)) for n in lengths]
            left = losses
            await settle()
            while not all(task.done() for task in tasks):
                legs = fleet.waiting_legs()
                if left and fleet.live and random.random() < 0.2:
                    left -= 1
                    victim = random.choice(fleet.live)
                    fleet.down.add(victim.incarnation.rank)
                    fleet.lose(victim)
                elif fleet.down and (not legs or random.random() < 0.3):
                    fleet.down.discard(min(fleet.down))
                elif legs:
                    random.choice(legs).release()
                await settle()
                it.remember()
            for task, length in zip(tasks, lengths, strict=True):
                chunks = task.result()
                found = tokens(chunks)
                whole = min(length, stop_after or length)
                if chunks[-1].finish is FinishReason.ERROR:
                    assert losses > 3
                    assert found == reference(len(found))
                else:
                    assert found == reference(whole)

    run_tidy(main)
