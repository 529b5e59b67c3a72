"""The streams a router has open, and the records that join a request's id to its attempts'."""

from __future__ import annotations

import asyncio
import logging

from core.clock import VirtualClock
from core.wire import Role
from router.dispatch import Dispatcher
from router.policy.least_load import LeastLoad
from tests.support.eventually import run_tidy
from tests.support.fronts import front, release_all, settle

PAIR = (Role.PREFILL, Role.DECODE)


def test_an_open_stream_shows_its_attempt_its_ranks_and_what_it_has_produced():
    async def main() -> None:
        async with front(*PAIR) as it:
            clock = VirtualClock()
            it.dispatcher = Dispatcher(it.replicas, LeastLoad(), LeastLoad(), clock=clock)
            task = asyncio.create_task(it.collect(4, rid="mine"))
            await settle()
            clock.advance(2.5)
            it.fleet.client(Role.PREFILL).legs[0].release()
            await settle()
            (view,) = it.dispatcher.live.views()
            assert (view.rid, view.attempt) == ("mine", "mine.0")
            assert view.ranks == ("prefill/0/0", "decode/0/0")
            (leg,) = it.fleet.client(Role.DECODE).legs
            assert view.room == leg.request.route.room
            assert (view.produced, view.age_s) == (1, 2.5)
            await release_all(it.fleet)
            await task
            assert it.dispatcher.live.views() == []

    run_tidy(main)


def test_a_stream_without_a_route_is_shown_too():
    async def main() -> None:
        async with front(Role.PREFILL) as it:
            task = asyncio.create_task(it.collect(4))
            await settle()
            (view,) = it.dispatcher.live.views()
            assert (view.attempt, view.ranks, view.room) == ("", (), 0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert it.dispatcher.live.views() == []

    run_tidy(main)


def test_the_log_joins_the_request_to_its_attempts_and_their_room(caplog):
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with front(*PAIR, Role.DECODE) as it:
            task = asyncio.create_task(it.collect(4, rid="mine"))
            await settle()
            (leg,) = [leg for c in it.fleet.live for leg in c.legs if c.info.role is Role.DECODE]
            room = leg.request.route.room
            it.fleet.lose(next(c for c in it.fleet.live if leg in c.legs))
            await settle()
            await release_all(it.fleet)
            await task
        said = [r for r in caplog.records if getattr(r, "rid", "") == "mine"]
        first, again, second = said
        assert f"room {room}, 5 tokens of prompt, 0 of output" in first.getMessage()
        assert "prefill on prefill/0/0@" in first.getMessage()
        assert (first.attempt, second.attempt) == ("mine.0", "mine.1")
        assert again.levelno == logging.WARNING
        assert again.getMessage().startswith("routing again after 0 tokens: ")

    run_tidy(main)
