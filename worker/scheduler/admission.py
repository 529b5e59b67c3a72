"""Admission: which waiting sequences get pages and join the running set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from worker.cache.prefix_cache import PrefixCache
from worker.cache.radix import common_prefix
from worker.scheduler.waiting import WaitingQueue
from worker.sequence import Sequence

Gate = Callable[[Sequence], bool]

WORTH_WAITING_FOR = 32  # shared tokens for which a duplicate waits for the first one's KV


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank can do in one step and in one request."""

    max_running: int  # sequences
    step_tokens: int
    decode_reserve: int  # output tokens of headroom for each running sequence
    context_len: int  # tokens of one sequence


def always(_: Sequence) -> bool:
    """The gate of a role that has no rule of its own."""
    return True


class Admission:
    """Takes from the waiting queue what fits, in order; all pages of a prompt at once.

    Reserving the whole prompt keeps its pages consecutive and means that a started prefill never
    waits for memory, so prefills cannot block one another.
    """

    def __init__(self, cache: PrefixCache, limits: Limits) -> None:
        self._cache = cache
        self._limits = limits
        self.gate: Gate = always  # a role may set its own

    def admit(self, waiting: WaitingQueue, running: list[Sequence], budget: int) -> list[Sequence]:
        """Move sequences from ``waiting`` to ``running`` until ``budget`` tokens are spoken for."""
        admitted: list[Sequence] = []
        for sequence in waiting:
            if (
                budget <= 0
                or len(running) >= self._limits.max_running
                or not self._cache.table.free
            ):
                break
            if not self.gate(sequence) or self._better_later(sequence, running):
                continue
            if not self.reserve(sequence, running, sequence.length, sequence.reusable_len):
                break
            waiting.remove(sequence)
            running.append(sequence)
            admitted.append(sequence)
            budget -= sequence.remaining
        return admitted

    def reserve(
        self, sequence: Sequence, running: Iterable[Sequence], to: int, match_limit: int
    ) -> bool:
        """Lock the cached prefix and own pages up to ``to``; False, holding nothing, if too few."""
        self._cache.begin(sequence, match_limit)
        need = to - sequence.allocated_len
        if need + self._headroom(running) <= self._cache.available and self._cache.extend(
            sequence, to
        ):
            return True
        self._cache.release(sequence)
        return False

    def _headroom(self, running: Iterable[Sequence]) -> int:
        """Pages that the running sequences will soon want."""
        cap = self._limits.decode_reserve
        return sum(min(cap, s.params.max_new_tokens - s.output_len) for s in running)

    def _better_later(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether a running prefill is about to compute a prefix that the cache lacks so far."""
        ahead = [s for s in running if s.remaining > 1 and s.salt == sequence.salt]
        if not ahead or sequence.unscored:
            return False
        shared = max(common_prefix(s.ids, sequence.ids[:-1]) for s in ahead)
        cached = self._cache.tree.peek(sequence.ids[:shared], sequence.salt)
        return shared >= WORTH_WAITING_FOR + cached
