"""Pacing: when each session starts, in an open or a closed loop, and the turns it then takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Protocol

from bench.client import Request
from bench.config import BenchConfig
from bench.conversation import Talk
from bench.outcome import Outcome
from bench.sessions import Session
from core.clock import Clock

DEFAULT_CONCURRENCY = 8
NOT_SENT = "not sent: an earlier turn of the conversation failed"


class Sender(Protocol):
    """The part of the client that pacing needs."""

    async def send(self, request: Request) -> Outcome: ...


def arrivals(config: BenchConfig, sessions: Sequence[Session]) -> list[float] | None:
    """Seconds from the start of the run to each session; None: a closed loop.

    A rate gives a Poisson process. A trace without rate and concurrency keeps its own times.
    The first session comes at 0.
    """
    if config.rate is not None:
        draw = random.Random(f"{config.seed}/arrivals")
        gaps = [draw.expovariate(config.rate) for _ in sessions[1:]]
        return list(accumulate(gaps, initial=0.0))
    if config.concurrency is not None or config.workload != "trace":
        return None
    times = [session.at_s or 0.0 for session in sessions]
    return [(at_s - times[0]) / config.speed for at_s in times]


class Runner:
    """Plays sessions against a sender and collects what became of every request."""

    def __init__(
        self,
        sender: Sender,
        config: BenchConfig,
        clock: Clock,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._sender = sender
        self._talk = Talk(config)
        self._clock = clock
        self._sleep = sleep
        self._on_outcome = on_outcome
        self._outcomes: list[Outcome] = []

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Of all requests that have ended so far."""
        return self._outcomes

    async def open_loop(
        self, sessions: Sequence[Session], offsets: Sequence[float]
    ) -> list[Outcome]:
        """Start each session at its offset, however many are still running."""
        start_s = self._clock.now()
        async with asyncio.TaskGroup() as tasks:
            for number, (session, offset) in enumerate(zip(sessions, offsets, strict=True)):
                due_s = start_s + offset
                if (wait_s := due_s - self._clock.now()) > 0:
                    await self._sleep(wait_s)
                tasks.create_task(self._play(number, session, due_s))
        return self._outcomes

    async def closed_loop(self, sessions: Sequence[Session], concurrency: int) -> list[Outcome]:
        """Keep ``concurrency`` sessions running until none is left."""
        waiting = iter(enumerate(sessions))

        async def user() -> None:
            for number, session in waiting:
                await self._play(number, session, self._clock.now())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(sessions))):
                tasks.create_task(user())
        return self._outcomes

    async def _play(self, number: int, session: Session, due_s: float) -> None:
        conversation = self._talk.start()
        for index, turn in enumerate(session.turns):
            prompt = conversation.ask(turn.spans)
            request = Request(prompt, turn.output_tokens, number, index, due_s)
            outcome = await self._sender.send(request)
            self._note(outcome)
            if not outcome.ok:
                self._give_up(number, range(index + 1, len(session.turns)))
                return
            conversation.heard(outcome.text)
            due_s = outcome.end_s

    def _give_up(self, number: int, turns: range) -> None:
        """The rest of a conversation cannot be asked: it counts as failed."""
        now = self._clock.now()
        for turn in turns:
            self._note(
                Outcome(
                    session=number, turn=turn, due_s=now, start_s=now, end_s=now, error=NOT_SENT
                )
            )

    def _note(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._on_outcome(outcome)
