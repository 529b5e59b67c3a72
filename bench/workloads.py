"""Synthetic request sets: random, shared prefix, multi-turn. The seed decides all of them.

A session is what one user does: turns one after the other, each with the whole conversation so far
as its prompt. All but the multi-turn workload have sessions of one turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from bench import traces
from bench.config import BenchConfig
from bench.sessions import Session, Turn
from bench.words import Span

DEFAULT_REQUESTS = 64


class Lengths:
    """Draws lengths around a mean; ``spread`` 0 gives the mean itself."""

    def __init__(self, seed: str, spread: float) -> None:
        self._random = random.Random(seed)
        self._spread = spread

    def draw(self, mean: int) -> int:
        low, high = round(mean * (1 - self._spread)), round(mean * (1 + self._spread))
        return max(1, self._random.randint(low, high))


class Draft(NamedTuple):
    """What a workload is made from: ``name`` starts every key, so that two drafts share nothing."""

    config: BenchConfig
    name: str
    requests: int
    lengths: Lengths

    def turn(self, key: str, *prefix: Span) -> Turn:
        """New tokens of the configured length after a prefix."""
        fresh = Span(f"{self.name}/{key}", self.lengths.draw(self.config.input_tokens))
        return Turn((*prefix, fresh), self.lengths.draw(self.config.output_tokens))

    def prefix(self, key: str) -> tuple[Span, ...]:
        """A prefix to share; none where its length is 0."""
        length = self.config.prefix_tokens
        return (Span(f"{self.name}/prefix/{key}", length),) if length else ()


def build(config: BenchConfig) -> list[Session]:
    """The sessions of a run, in the order of their arrival."""
    if config.workload == "trace":
        return traces.read(config)
    return _synthetic(config, "run", config.requests or DEFAULT_REQUESTS)


def warmup(config: BenchConfig) -> list[Session]:
    """Sessions that warm a server up and share no token with those of the run."""
    if config.workload != "trace":
        return _synthetic(config, "warmup", config.warmup)
    draft = Draft(config, _name(config, "warmup"), config.warmup, Lengths("", 0.0))
    return _random(draft)


def _synthetic(config: BenchConfig, part: str, requests: int) -> list[Session]:
    name = _name(config, part)
    draft = Draft(config, name, requests, Lengths(f"{name}/lengths", config.spread))
    kinds: dict[str, Callable[[Draft], list[Session]]] = {
        "random": _random,
        "shared-prefix": _shared_prefix,
        "multi-turn": _multi_turn,
    }
    return kinds[config.workload](draft)


def _name(config: BenchConfig, part: str) -> str:
    return f"{config.seed}/{part}"


def _random(draft: Draft) -> list[Session]:
    return [Session((draft.turn(str(i)),)) for i in range(draft.requests)]


def _shared_prefix(draft: Draft) -> list[Session]:
    """Equally many requests with each prefix, shuffled."""
    groups = [i % draft.config.prefixes for i in range(draft.requests)]
    random.Random(f"{draft.name}/order").shuffle(groups)
    return [
        Session((draft.turn(str(i), *draft.prefix(str(group))),)) for i, group in enumerate(groups)
    ]


def _multi_turn(draft: Draft) -> list[Session]:
    """Conversations of ``turns`` turns behind one common prefix; the last may be shorter."""
    sessions = []
    for first in range(0, draft.requests, draft.config.turns):
        last = min(first + draft.config.turns, draft.requests)
        opening = draft.turn(str(first), *draft.prefix("0"))
        sessions.append(Session((opening, *(draft.turn(str(i)) for i in range(first + 1, last)))))
    return sessions
