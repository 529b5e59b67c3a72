"""An engine of fluid time: requests wait, are prefilled one after another, and generate together.

Its cache is the worker's own radix tree. Time is the caller's: ``submit`` and ``advance`` get it,
``next_event`` says when something will happen by itself. Nothing is computed; a step takes

    d0 + d1 x generating requests + d2 x their tokens  (+ chunk x seconds a token, while prefilling)

and brings each generating request one token and the prompt in work ``chunk`` effective tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from core.wire import Int32Array
from worker.cache.node import Node
from worker.cache.radix import RadixTree

EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Costs in seconds, sizes in tokens."""

    capacity: int
    max_running: int = 64
    chunk: int = 4096
    seconds_per_token: float = 60e-6
    attention_tokens: float = 65536.0  # context at which attention costs as much as the rest
    request_tokens: float = 64.0
    step_s: float = 0.010
    step_s_per_request: float = 0.00015
    step_s_per_token: float = 2e-8

    def work(self, new: int, cached: int) -> float:
        """Effective tokens of a prefill."""
        return self.request_tokens + new * (1 + (cached + new / 2) / self.attention_tokens)


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request, and when what happened to it."""

    prompt: Int32Array
    output: Int32Array
    on_first_token: Callable[[float], None]
    on_done: Callable[[float], None]
    cached: int = 0
    reserved: int = 0  # tokens of its own: not in the tree yet
    node: Node | None = None  # what it locks of the tree


class SimEngine:
    """One rank that prefills and decodes."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.tree = RadixTree()
        self.now = 0.0
        self.prefilled_tokens = 0
        self._waiting: deque[SimRequest] = deque()
        self._prefilling: SimRequest | None = None
        self._work_left = 0.0
        self._generating: list[tuple[float, int, SimRequest]] = []  # by the step they end with
        self._steps = 0.0
        self._reserved = 0
        self._context = 0  # prompt tokens of everything admitted
        self._count = 0

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._generating)

    def submit(self, request: SimRequest, now: float) -> None:
        self.advance(now)
        self._waiting.append(request)
        self._admit()

    def next_event(self) -> float | None:
        """When the next prompt or output is complete; None while nothing runs."""
        step = self._step_s()
        times = []
        if self._prefilling:
            times.append(self._work_left * step / self.model.chunk)
        if self._generating:
            times.append(max(0.0, self._generating[0][0] - self._steps) * step)
        return self.now + min(times) if times else None

    def advance(self, now: float) -> None:
        """Let everything happen that happens until ``now``."""
        while (at := self.next_event()) is not None and at <= now:
            self._flow(at - self.now)
            self.now = at
            if self._prefilling and self._work_left <= 1e-6:
                self._first_token(self._prefilling)
            while self._generating and self._generating[0][0] - self._steps <= EPSILON:
                self._done(heappop(self._generating)[2])
            self._admit()
        if now > self.now:
            self._flow(now - self.now)
            self.now = now

    def _step_s(self) -> float:
        model = self.model
        decode = model.step_s + model.step_s_per_request * len(self._generating)
        decode += model.step_s_per_token * self._context
        return decode + model.chunk * model.seconds_per_token if self._prefilling else decode

    def _flow(self, seconds: float) -> None:
        steps = seconds / self._step_s()
        if self._prefilling:
            self._work_left -= steps * self.model.chunk
        if self._generating:
            self._steps += steps

    def _admit(self) -> None:
        while self._waiting and not self._prefilling:
            if len(self._generating) >= self.model.max_running or not self._fits(self._waiting[0]):
                return
            request = self._prefilling = self._waiting.popleft()
            new = len(request.prompt) - request.cached
            self._reserved += request.reserved
            self._context += len(request.prompt)
            self._work_left = self.model.work(new, request.cached)
            self.prefilled_tokens += new

    def _fits(self, request: SimRequest) -> bool:
        """Lock the cached prefix and make room for the rest; False where others must end first."""
        found = self.tree.match(request.prompt)
        self.tree.lock(found.node)
        request.node = found.node
        request.cached = min(found.length, len(request.prompt) - 1)
        request.reserved = len(request.prompt) - request.cached + len(request.output)
        free = self.model.capacity - self.tree.tokens - self._reserved
        if request.reserved > free:
            free += len(self.tree.evict(request.reserved - free))
        if request.reserved > free and self._generating:
            self.tree.unlock(found.node)
            return False
        return True

    def _first_token(self, request: SimRequest) -> None:
        self._prefilling = None
        self._keep(request, request.prompt)
        self._reserved -= request.reserved - len(request.output)
        request.reserved = len(request.output)
        request.on_first_token(self.now)
        if len(request.output) <= 1:
            self._done(request)
            return
        self._count += 1
        end = self._steps + len(request.output) - 1
        heappush(self._generating, (end, self._count, request))

    def _done(self, request: SimRequest) -> None:
        self._keep(request, whole(request))
        assert request.node is not None
        self.tree.unlock(request.node)
        self._reserved -= request.reserved
        self._context -= len(request.prompt)
        request.on_done(self.now)

    def _keep(self, request: SimRequest, ids: Int32Array) -> None:
        """Put computed tokens into the tree, locked for the request."""
        node, _ = self.tree.insert(ids, ids)  # slots do not matter here
        self.tree.lock(node)
        assert request.node is not None
        self.tree.unlock(request.node)
        request.node = node


def whole(request: SimRequest) -> Int32Array:
    """Prompt and output."""
    return np.concatenate([request.prompt, request.output])
