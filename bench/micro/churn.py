"""A rank's page pool under traffic: the real radix tree and allocator, no model.

Requests come as fast as pages allow. Three in ten go on with a conversation that ended here, three
begin with one of a few system prompts, the others are new. A decode rank takes a prompt's pages at
once and then more as the answer grows; a prefill rank gives all back when the KV has been sent.
What ends stays cached until it is evicted, so the pool is full after the first few requests.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from core.wire import (
    Incarnation,
    Int32Array,
    RankId,
    Role,
    Route,
    SamplingParams,
    TokenRequest,
    pack_ids,
)
from worker.cache.prefix_cache import PrefixCache
from worker.sequence import Sequence

CONTEXT = 8192  # tokens
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 512
HEADROOM = 64  # pages kept free for each running sequence, as a scheduler does
CONVERSATIONS = 32  # that may go on


@dataclass(frozen=True, slots=True)
class Traffic:
    """Lengths in tokens, each drawn evenly from a range."""

    prompt: tuple[int, int] = (200, 4000)
    output: tuple[int, int] = (30, 600)
    running: int = 12  # at most, at the same time


class Churn:
    """One rank of ``role`` with a pool of its own; ``cache`` makes it of (pages, rows, width)."""

    def __init__(
        self,
        role: Role,
        pages: int,
        traffic: Traffic = Traffic(),
        seed: int = 0,
        cache: Callable[[int, int, int], PrefixCache] = PrefixCache,
    ) -> None:
        self.cache = cache(pages, 2 * traffic.running, CONTEXT)
        self._decodes = role is not Role.PREFILL
        self._traffic = traffic
        self._random = random.Random(seed)
        self._ids = np.random.default_rng(seed)
        self._systems = [self._new(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        self._told: deque[Int32Array] = deque(maxlen=CONVERSATIONS)
        self._running: list[Sequence] = []
        self._count = 0

    def serve(self, requests: int) -> list[Int32Array]:
        """Serve some more; of each the slots of what was not cached, which is what crosses."""
        return [self._place(self._prompt()) for _ in range(requests)]

    def place(self, tokens: int) -> Int32Array:
        """The slots that a new prompt of this length gets now."""
        return self._place(self._new(tokens))

    def _new(self, tokens: int) -> Int32Array:
        return self._ids.integers(0, 50_000, tokens, dtype=np.int32)

    def _prompt(self) -> Int32Array:
        fresh = self._new(self._random.randint(*self._traffic.prompt))
        kind, before = self._random.random(), fresh[:0]
        if kind < 0.3 and self._told:
            before = self._random.choice(self._told)
        elif kind < 0.6:
            before = self._random.choice(self._systems)
        fits = len(before) + len(fresh) + self._traffic.output[1] < CONTEXT
        return np.concatenate([before, fresh]) if fits else fresh

    def _place(self, ids: Int32Array) -> Int32Array:
        self._count += 1
        output = self._random.randint(*self._traffic.output)
        waiting = Sequence.of(_request(self._count, ids, output), "router", CONTEXT)
        while not self._fits(waiting):
            self._go_on()
        slots = self._admit(waiting)
        if self._decodes:
            self._step()
        return slots

    def _fits(self, waiting: Sequence) -> bool:
        spare = HEADROOM * (len(self._running) + 1) if self._decodes else 0
        needs = waiting.length + spare
        return len(self._running) < self._traffic.running and needs <= self.cache.available

    def _admit(self, waiting: Sequence) -> Int32Array:
        self.cache.begin(waiting, waiting.length if self._decodes else waiting.length - 1)
        start = waiting.allocated_len
        assert self.cache.extend(waiting, waiting.length)
        slots = self.cache.table.read(waiting.row, start, waiting.length)
        waiting.computed_len = waiting.length
        self.cache.commit(waiting)
        self._running.append(waiting)
        return slots

    def _go_on(self) -> None:
        """Until there is more room: a decode step, or the end of a prefill rank's oldest."""
        if self._decodes:
            self._step()
        else:
            self.cache.release(self._running.pop(0))

    def _step(self) -> None:
        """A token for each running sequence."""
        for sequence in list(self._running):
            sequence.append(self._random.randrange(50_000))
            ended = sequence.output_len >= sequence.params.max_new_tokens
            if ended or not self.cache.grow(sequence, len(sequence.tokens) - 1):
                self._running.remove(sequence)
                self._told.append(sequence.ids.copy())
                self.cache.release(sequence)
            else:
                sequence.computed_len = sequence.length


def _request(number: int, ids: Int32Array, output: int) -> TokenRequest:
    rank = Incarnation(rank=RankId(group="bench", replica=0, rank=0), endpoint="", nonce="")
    return TokenRequest(
        rid=str(number),
        token_ids=pack_ids(ids),
        prompt_len=len(ids),
        params=SamplingParams(max_new_tokens=output),
        route=Route(room=number, prefill=rank, decode=rank),
    )
