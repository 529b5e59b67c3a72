"""Admission: which waiting sequences get pages and join the running set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from worker.cache.node import common_prefix
from worker.cache.prefix_cache import PrefixCache
from worker.scheduler.headroom import Headroom
from worker.scheduler.waiting import WaitingQueue
from worker.sequence import Sequence

Gate = Callable[[Sequence], bool]

WORTH_WAITING_FOR = 32  # shared tokens for which a duplicate waits for the first one's KV


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank can do in one step and in one request."""

    max_running: int  # sequences
    step_tokens: int
    context_len: int  # tokens of one sequence
    conservativeness: float = 0.0  # scales the pages kept free for output; see headroom.py


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
        self.headroom = Headroom(limits.conservativeness, cache.page_size)
        self.gate: Gate = always  # a role may set its own

    def admit(self, waiting: WaitingQueue, running: list[Sequence], budget: int) -> list[Sequence]:
        """Move sequences from ``waiting`` to ``running`` until ``budget`` tokens are spoken for."""
        admitted: list[Sequence] = []
        if budget <= 0 or not len(waiting):
            return admitted
        prefills = _Prefills(running, self._cache.page_size)
        headroom = self.headroom.pages(running)
        for sequence in waiting:
            if (
                budget <= 0
                or len(running) >= self._limits.max_running
                or not self._cache.table.free
            ):
                break
            if self._better_later(sequence, prefills) or not self.gate(sequence):
                continue
            own = self.headroom.pages((sequence,))
            spare = headroom + own if running else 0
            if not self._hold(sequence, sequence.length, sequence.reusable_len, spare):
                break
            waiting.remove(sequence)
            running.append(sequence)
            admitted.append(sequence)
            prefills.add(sequence)
            headroom += own
            budget -= sequence.remaining
        return admitted

    def reserve(
        self, sequence: Sequence, running: Collection[Sequence], to: int, match_limit: int
    ) -> bool:
        """Lock the cached prefix and own pages up to ``to``; False, holding nothing, if too few."""
        spare = self.headroom.pages((*running, sequence)) if running else 0
        return self._hold(sequence, to, match_limit, spare)

    def _hold(self, sequence: Sequence, to: int, match_limit: int, spare: int) -> bool:
        """With ``spare`` slots left over. Alone, a sequence may take all there is.

        Rather than wait for pages it does without what it could copy: the source is locked for it.
        """
        self._cache.begin(sequence, match_limit)
        need = self._cache.rounded(to) - sequence.allocated_len
        while True:
            if need + spare <= self._cache.available and self._cache.extend(sequence, to):
                return True
            if not self._cache.forgo(sequence):
                self._cache.release(sequence)
                return False

    def _better_later(self, sequence: Sequence, prefills: _Prefills) -> bool:
        """Whether a running prefill is about to compute a prefix that the cache lacks so far."""
        if sequence.unscored:
            return False
        shared = prefills.shared_with(sequence)
        if shared < WORTH_WAITING_FOR:
            return False
        cached = self._cache.tree.peek(sequence.ids[:shared], sequence.salt)
        return shared >= WORTH_WAITING_FOR + cached


class _Prefills:
    """Running prefills by salt and first tokens: only equal ones are compared in full."""

    def __init__(self, running: Iterable[Sequence], page_size: int) -> None:
        self._page_size = page_size
        self._by_start: dict[tuple[str, bytes], list[Sequence]] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        if sequence.remaining > 1:
            self._by_start.setdefault(_start(sequence), []).append(sequence)

    def shared_with(self, sequence: Sequence) -> int:
        """The longest common prefix, without the last token; less than is worth it counts as 0.

        Of the pages that a prefill fills: nobody gets at its last one before it ends.
        """
        alike = self._by_start.get(_start(sequence), ())
        mine, size = sequence.ids[:-1], self._page_size
        return max(
            (common_prefix(s.ids[: s.length // size * size], mine) for s in alike), default=0
        )


def _start(sequence: Sequence) -> tuple[str, bytes]:
    return sequence.salt, sequence.ids[:WORTH_WAITING_FOR].tobytes()
