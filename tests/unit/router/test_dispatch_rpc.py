"""Dispatcher, replicas and the worker RPC together: a rank dies in the middle of a stream."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing

from core import wire
from core.rpc import events
from core.rpc.client import Connector
from router.dispatch import Dispatcher, DispatchLimits
from router.policy.round_robin import RoundRobin
from router.replicas import Member, Replicas
from tests.support.eventually import eventually, run_tidy
from tests.support.step_thread import StepThread, answer_all, serving


def two_tokens_and_no_more(thread: StepThread, event: events.RankEvent) -> None:
    """Start each request and never finish it."""
    if isinstance(event, events.Submitted):
        chunk = wire.TokenChunk(rid=event.request.rid, offset=0, token_ids=(100, 101))
        report = wire.StepReport(chunks=(chunk,), load=wire.LoadReport())
        thread.server.deliver(event.router, report)
    else:
        answer_all(thread, event)


def go_on(thread: StepThread, event: events.RankEvent) -> None:
    """Continue from wherever the request stands, as a real engine does."""
    if isinstance(event, events.Submitted):
        request = event.request
        start = len(request.ids()) - request.prompt_len
        rest = tuple(range(100 + start, 100 + request.params.max_new_tokens))
        end = wire.FinishReason.LENGTH
        chunk = wire.TokenChunk(rid=request.rid, offset=start, token_ids=rest, finish=end)
        report = wire.StepReport(chunks=(chunk,), load=wire.LoadReport())
        thread.server.deliver(event.router, report)
    else:
        answer_all(thread, event)


def test_a_stream_outlives_its_rank():
    async def main() -> None:
        replicas = Replicas(Connector("router"))
        limits = DispatchLimits(reroute_wait_s=10.0)
        dispatcher = Dispatcher(replicas, RoundRobin(), RoundRobin(), limits=limits)
        async with AsyncExitStack() as old_life, serving(nonce="new") as new:
            old = await old_life.enter_async_context(serving(nonce="old"))
            old.answer, new.answer = two_tokens_and_no_more, go_on
            replicas.update([Member(old.info.incarnation, wire.Role.UNIFIED)])
            params = wire.SamplingParams(max_new_tokens=5)
            async with aclosing(dispatcher.stream("r", [1, 2, 3], params)) as stream:
                chunks = [await anext(stream)]
                await old_life.aclose()
                await eventually(lambda: not replicas.complete)
                replicas.update([Member(new.info.incarnation, wire.Role.UNIFIED)])
                chunks += [chunk async for chunk in stream]
            assert [t for c in chunks for t in c.token_ids] == [100, 101, 102, 103, 104]
            assert chunks[-1].finish is wire.FinishReason.LENGTH
            (event,) = new.seen(events.Submitted)
            assert event.request.ids().tolist() == [1, 2, 3, 100, 101]
            assert event.request.prompt_len == 3
            await replicas.close()

    run_tidy(main)


def test_many_streams_over_one_session_all_end():
    async def main() -> None:
        replicas = Replicas(Connector("router"))
        dispatcher = Dispatcher(replicas, RoundRobin(), RoundRobin())

        async def one(index: int) -> list[int]:
            params = wire.SamplingParams(max_new_tokens=4)
            async with aclosing(dispatcher.stream(f"r{index}", [index], params)) as stream:
                return [token async for chunk in stream for token in chunk.token_ids]

        async with serving() as rank:
            rank.answer = go_on
            replicas.update([Member(rank.info.incarnation, wire.Role.UNIFIED)])
            answers = await asyncio.gather(*(one(i) for i in range(200)))
            assert answers == [[100, 101, 102, 103]] * 200
            (replica,) = replicas.routable(wire.Role.UNIFIED)
            assert replica.outstanding_tokens == 0
            await replicas.close()

    run_tidy(main)
