"""Several simulated ranks behind a real routing policy, on a virtual clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from bench.sim.engine import EngineModel, SimEngine, SimRequest, whole
from bench.sim.traces import TraceRequest, answer
from core.clock import VirtualClock
from core.wire import Incarnation, Int32Array, LoadReport, RankId
from router.policy.base import Policy

EXPECTED_OUTPUT_TOKENS = 256  # what a router books: it does not know how long an answer gets
LATE_ARRIVAL = 1 << 30  # order among simultaneous arrivals: children after roots


@dataclass(frozen=True, slots=True)
class Served:
    """How one request went. Seconds and tokens."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    e2e_s: float


class SimRank:
    """A policy's Candidate in front of a simulated engine."""

    load = LoadReport()  # nobody else sends to these ranks, so a report would add nothing

    def __init__(self, number: int, model: EngineModel) -> None:
        self.rank = RankId(group="unified", replica=number)
        self.incarnation = Incarnation(rank=self.rank, endpoint=f"sim:{number}", nonce="0")
        self.capacity_tokens = model.capacity
        self.outstanding_tokens = 0
        self.outstanding_requests = 0
        self.engine = SimEngine(model)


@dataclass(frozen=True, slots=True)
class _Arrival:
    at: float
    order: int
    request: TraceRequest
    before: Int32Array  # prompt and output of the parent

    def __lt__(self, other: _Arrival) -> bool:
        return (self.at, self.order) < (other.at, other.order)


class Replay:
    """One run of a trace; ``run`` it once."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        ranks: Sequence[SimRank],
        policy: Policy,
        clock: VirtualClock,
    ) -> None:
        self._ranks = ranks
        self._policy = policy
        self._clock = clock
        self._order = count(LATE_ARRIVAL)
        self._children: dict[int, list[TraceRequest]] = defaultdict(list)
        self._arrivals: list[_Arrival] = []
        self._served: list[Served] = []
        nothing = np.empty(0, dtype=np.int32)
        for request in trace:
            if request.parent is None:
                self._arrivals.append(_Arrival(request.t, request.id, request, nothing))
            else:
                self._children[request.parent].append(request)
        heapify(self._arrivals)

    def run(self) -> list[Served]:
        """Serve everything; in order of completion."""
        while True:
            engine, at = self._next_engine()
            if engine is not None and (not self._arrivals or at <= self._arrivals[0].at):
                engine.advance(at + 1e-12)
            elif self._arrivals:
                self._arrive(heappop(self._arrivals))
            else:
                assert all(rank.engine.idle for rank in self._ranks), "a request never ended"
                return self._served

    def _next_engine(self) -> tuple[SimEngine | None, float]:
        times = [(at, rank) for rank in self._ranks if (at := rank.engine.next_event()) is not None]
        if not times:
            return None, 0.0
        at, rank = min(times, key=lambda pair: pair[0])
        return rank.engine, at

    def _arrive(self, arrival: _Arrival) -> None:
        now = arrival.at
        for rank in self._ranks:
            rank.engine.advance(now)
        self._set_clock(now)
        prompt = np.concatenate([arrival.before, arrival.request.body()])
        rank, ticket = self._policy.assign(self._ranks, prompt)
        booked = len(prompt) + EXPECTED_OUTPUT_TOKENS
        rank.outstanding_requests += 1
        rank.outstanding_tokens += booked
        first_at: list[float] = []

        def first_token(at: float) -> None:
            self._set_clock(at)
            first_at.append(at)
            ticket.started(request.cached)

        def done(at: float) -> None:
            self._set_clock(at)
            rank.outstanding_requests -= 1
            rank.outstanding_tokens -= booked
            tokens = whole(request)
            ticket.ended(tokens)
            self._served.append(Served(len(prompt), request.cached, first_at[0] - now, at - now))
            for child in self._children[arrival.request.id]:
                later = _Arrival(at + child.t, next(self._order), child, tokens)
                heappush(self._arrivals, later)

        output = answer(prompt, max(1, arrival.request.out))
        request = SimRequest(prompt, output, first_token, done)
        rank.engine.submit(request, now)

    def _set_clock(self, now: float) -> None:
        self._clock.advance(max(0.0, now - self._clock.now()))
