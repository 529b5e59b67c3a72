"""Which rank holds how much of a prefix: one structure of chained block hashes for all ranks.

    run   hashes 0..5   held by A: 6, B: 6        a prompt that A and B know
    └ run hashes 6..9   held by A: 4              its continuation, on A
      run hashes 6'..7' held by B: 2 (pinned)     another one, queued on B

A hash covers everything before it, so the hash of a run's first block is enough to find the run,
and no links between runs are needed. A rank that holds a run holds all runs before it.

The index is a belief: it learns from what this router sends and gets, evicts as the rank would
(least recently used, at its real capacity), and is never asked for more than a cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from core.block_hash import BlockHashes, block_hashes
from core.wire import Incarnation, Int32Array
from router.prefix_shelf import Holding, Run, Shelf


class PrefixIndex:
    """Lengths and capacities in blocks, times in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._shelves: dict[Incarnation, Shelf] = {}

    def shelf(self, owner: Incarnation, capacity: int) -> Shelf:
        """The shelf of one life of a rank, made when it is first asked for."""
        shelf = self._shelves.get(owner)
        if shelf is None:
            shelf = self._shelves[owner] = Shelf(owner, capacity)
        return shelf

    def forget(self, owner: Incarnation) -> None:
        """The rank is gone with its cache. Costs O(runs it held)."""
        shelf = self._shelves.pop(owner, None)
        if shelf is None:
            return
        shelf.gone = True
        for holding in shelf.holdings():
            self._remove(holding)

    def match(self, hashes: BlockHashes) -> dict[Shelf, int]:
        """Leading blocks of ``hashes`` on every rank that holds any, queued ones included."""
        depth: dict[Shelf, int] = {}
        start = 0
        for run, shared in self._walk(hashes):
            for shelf, holding in run.holdings.items():
                depth[shelf] = start + min(holding.blocks, shared)
            start += shared
        return depth

    def insert(self, shelf: Shelf, hashes: BlockHashes, now: float) -> None:
        """The rank has computed this prefix and used it now; makes room as the rank would."""
        if shelf.gone:
            return
        for holding in reversed(self._cover(shelf, hashes)):
            holding.sure = holding.blocks
            shelf.touch(holding, now)
        self._evict(shelf)

    # --- prefixes of queued requests: see QueuedPrefix ---------------------------------------

    def pin(self, shelf: Shelf, hashes: BlockHashes) -> None:
        """A request was sent that will need, and leave, this prefix."""
        for holding in self._cover(shelf, hashes):
            shelf.pin(holding)

    def confirm(self, shelf: Shelf, hashes: BlockHashes, now: float) -> None:
        """The request has computed it: undo ``pin``, keep the prefix."""
        for holding in reversed(self._cover(shelf, hashes)):
            holding.sure = holding.blocks
            shelf.unpin(holding, now)
        self._evict(shelf)

    def cancel(self, shelf: Shelf, hashes: BlockHashes, now: float) -> None:
        """The request never ran: undo ``pin``, forget what only it would have computed."""
        for holding in reversed(self._cover(shelf, hashes)):
            shelf.unpin(holding, now)
            if not holding.pins:
                self._cut(holding, holding.sure)
        self._evict(shelf)

    # --- inside -----------------------------------------------------------------------------

    def _walk(self, hashes: BlockHashes) -> Iterator[tuple[Run, int]]:
        """The runs along ``hashes``, each with the number of its blocks they share."""
        start = 0
        while start < len(hashes) and (run := self._runs.get(hashes[start])) is not None:
            shared = _shared(run.hashes, hashes, start)
            yield run, shared
            if shared < len(run.hashes):
                return
            start += shared

    def _cover(self, shelf: Shelf, hashes: BlockHashes) -> list[Holding]:
        """Make the shelf hold exactly this path, split where it ends; root first."""
        runs, start = [], 0
        for run, shared in list(self._walk(hashes)):
            if shared < len(run.hashes):
                self._split(run, shared)
            runs.append(run)
            start += shared
        if start < len(hashes):
            run = self._runs[hashes[start]] = Run(hashes[start:])
            runs.append(run)
        return [self._hold(shelf, run) for run in runs]

    def _hold(self, shelf: Shelf, run: Run) -> Holding:
        holding = run.holdings.get(shelf) or shelf.add(run)
        if holding.blocks < len(run.hashes):
            shelf.resize(holding, len(run.hashes))
        return holding

    def _split(self, head: Run, at: int) -> None:
        """Cut a run in two; every rank keeps what it holds, at the age it has."""
        tail = self._runs[head.hashes[at]] = Run(head.hashes[at:])
        head.hashes = head.hashes[:at]
        for shelf, first in head.holdings.items():
            if first.blocks > at:
                second = tail.holdings[shelf] = Holding(shelf, tail)
                second.blocks, first.blocks = first.blocks - at, at
                second.sure, first.sure = max(0, first.sure - at), min(first.sure, at)
                second.pins, second.used_at = first.pins, first.used_at
                second.link_before(first)  # a child is older

    def _evict(self, shelf: Shelf) -> None:
        while shelf.held > shelf.capacity:
            holding = shelf.oldest
            assert holding is not None, "blocks are held by nothing"
            self._cut(holding, max(0, holding.blocks - (shelf.held - shelf.capacity)))

    def _cut(self, holding: Holding, blocks: int) -> None:
        """Keep only so many blocks of a leaf; the run keeps what its longest holder has."""
        if blocks == holding.blocks:
            return
        if not blocks:
            self._remove(holding)
            return
        holding.shelf.resize(holding, blocks)
        self._shorten(holding.run)

    def _remove(self, holding: Holding) -> None:
        run = holding.run
        holding.shelf.remove(holding)
        if run.holdings:
            self._shorten(run)
        else:
            del self._runs[run.hashes[0]]

    def _shorten(self, run: Run) -> None:
        longest = max(holding.blocks for holding in run.holdings.values())
        if longest < len(run.hashes):
            run.hashes = run.hashes[:longest]

    def check(self) -> None:
        """Raise AssertionError unless counts, ages and runs agree."""
        places = {h: i for s in self._shelves.values() for i, h in enumerate(s.holdings())}
        held = dict.fromkeys(self._shelves.values(), 0)
        pinned = dict.fromkeys(self._shelves.values(), 0)
        for first, run in self._runs.items():
            assert run.hashes[0] == first
            assert max(h.blocks for h in run.holdings.values()) == len(run.hashes)
            for shelf, holding in run.holdings.items():
                assert holding in places, "a holding is in no list"
                assert 0 <= holding.sure <= holding.blocks > 0
                (pinned if holding.pins else held)[shelf] += holding.blocks
        assert len(places) == sum(len(run.holdings) for run in self._runs.values())
        for shelf in self._shelves.values():
            assert (shelf.held, shelf.pinned) == (held[shelf], pinned[shelf])
            assert shelf.held <= shelf.capacity
            unpinned = [h for h in shelf.holdings() if not h.pins]
            assert all(a.used_at <= b.used_at for a, b in pairwise(unpinned))


def _shared(run: BlockHashes, hashes: BlockHashes, start: int) -> int:
    """Blocks of ``run`` that ``hashes`` has from ``start`` on; the first is known to be equal.

    Chained hashes agree up to a point and never again, so a bisection finds it.
    """
    most = min(len(run), len(hashes) - start)
    if run[most - 1] == hashes[start + most - 1]:
        return most
    low, high = 0, most - 1  # equal at low, different at high
    while high - low > 1:
        middle = (low + high) // 2
        if run[middle] == hashes[start + middle]:
            low = middle
        else:
            high = middle
    return high


class QueuedPrefix:
    """One request's place in the index, from the moment it is sent until it ends."""

    def __init__(
        self, index: PrefixIndex, shelf: Shelf, hashes: BlockHashes, cache_salt: str = ""
    ) -> None:
        """``cache_salt`` is the one in ``hashes``."""
        self.shelf = shelf
        self._index = index
        self._hashes = hashes
        self._salt = cache_salt
        self._queued = True
        index.pin(shelf, hashes)

    def computed(self, now: float) -> None:
        """The whole prompt is in the rank's cache."""
        if self._queued:
            self._queued = False
            if not self.shelf.gone:
                self._index.confirm(self.shelf, self._hashes, now)

    def ended(self, token_ids: Int32Array | None, now: float) -> None:
        """On every way out, once. ``token_ids`` are what is in the cache now, where known."""
        if self._queued:
            self._queued = False
            if not self.shelf.gone:
                self._index.cancel(self.shelf, self._hashes, now)
        elif token_ids is not None:
            hashes = block_hashes(token_ids, self._salt, known=self._hashes)
            self._index.insert(self.shelf, hashes, now)
