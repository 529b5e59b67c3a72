"""PrefixCache: the only memory object the scheduler sees: begin, extend, commit, release.

Who owns the pages of a sequence:

    [0, shared_len)               the tree, locked through ``sequence.node``
    [shared_len, allocated_len)   the sequence

``commit`` moves the boundary up to what has been computed; ``release`` gives everything back.

Sizes are counted in token slots, and always in whole pages. With pages of several tokens a cached
prefix may end inside a page. The sequence then owns that page, and the tokens it shares are copied
into it at the beginning of the next step, whosever step that is: they count as computed at once.

What a sequence gives up while a step in flight uses it is parked: it becomes free when the last
step that was launched before is collected. So a sequence may leave at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from core.wire import Int32Array, PageAccount
from worker.cache.copies import SlotCopy
from worker.cache.node import EMPTY, Node
from worker.cache.radix import Boundary, RadixTree
from worker.cache.request_table import RequestTable
from worker.cache.slots import NOWHERE, SlotAllocator
from worker.sequence import NO_ROW, Sequence

GROWTH = 16  # slots a decoding sequence takes at once, so that its pages stay consecutive
SLACK = 32  # one part in so many of the pool is evicted beyond need: scraps need not be used up


@dataclass(frozen=True, slots=True)
class Given:
    """Given up by a sequence."""

    slots: Int32Array  # its own
    node: Node | None = None  # was locked for it
    row: int = NO_ROW
    step: int = 0  # the last one that may use them


class PrefixCache:
    """Tree, allocator and request table, always changed together."""

    def __init__(self, slots: int, rows: int, context_len: int, page_size: int = 1) -> None:
        """``slots`` are whole pages; ``context_len`` tokens of one sequence."""
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.slots = SlotAllocator(slots, page_size)
        self.table = RequestTable(rows, self.rounded(context_len))
        self._owned = 0  # slots, by sequences, or parked
        self._due: dict[Sequence, Boundary] = {}  # what the next step is to copy
        self._parked: deque[Given] = deque()
        self._launched = self._collected = 0  # steps

    def rounded(self, tokens: int) -> int:
        """The slots of all pages that so many tokens lie in."""
        return -(-tokens // self.page_size) * self.page_size

    def launched(self) -> tuple[SlotCopy, ...]:
        """A step will use rows and pages as they are now. It begins with these copies."""
        self._launched += 1
        copies = []
        for sequence, boundary in self._due.items():
            start, source = sequence.shared_len, boundary.slots
            target = self.table.read(sequence.row, start, start + len(source))
            copies.append(SlotCopy(source, target))
            sequence.copied_by = self._launched
            self._parked.append(Given(EMPTY, boundary.node, step=self._launched))
        self._due.clear()
        return tuple(copies)

    def collected(self) -> None:
        """The oldest step in flight is done with them."""
        self._collected += 1
        while self._parked and self._parked[0].step <= self._collected:
            self._free(self._parked.popleft())

    @property
    def in_flight(self) -> int:
        """Steps launched and not collected."""
        return self._launched - self._collected

    @property
    def copies_due(self) -> bool:
        """Whether a step is wanted, if only for what it copies."""
        return bool(self._due)

    @property
    def available(self) -> int:
        """Slots that can be had now, by eviction if need be."""
        return self.slots.free + self.tree.evictable

    def begin(self, sequence: Sequence, limit: int) -> None:
        """Give the sequence a row and lock the longest cached prefix of its first ``limit`` tokens.

        Cached under its salt, that is. A sequence that samples needs the logits of its last token,
        so its limit is one less than its length. Where the prefix ends inside a page, ``extend``
        to its end has to follow, or ``forgo``, or ``release``.
        """
        assert sequence.row == NO_ROW, sequence.rid
        found = self.tree.match(sequence.ids[:limit], sequence.salt)
        self.tree.lock(found.node)
        sequence.node = found.node
        sequence.row = self.table.take()
        self.table.write(sequence.row, 0, found.slots)
        sequence.shared_len = sequence.allocated_len = known = found.length
        if found.boundary is not None:
            self.tree.lock(found.boundary.node)
            self._due[sequence] = found.boundary
            known += len(found.boundary.slots)
        _found(sequence, known)

    def forgo(self, sequence: Sequence) -> bool:
        """Let it compute what it was to copy; whether there was anything. Unlocks the source."""
        boundary = self._due.pop(sequence, None)
        if boundary is None:
            return False
        self.tree.unlock(boundary.node)
        _found(sequence, sequence.shared_len)
        return True

    def extend(self, sequence: Sequence, to: int) -> bool:
        """Own pages for tokens up to ``to``; False, and nothing changed, when there are none."""
        want = self.rounded(to) - sequence.allocated_len
        if want <= 0:
            return True
        last = int(self.table.slots[sequence.row, sequence.allocated_len - 1])
        slots = self._allocate(want, last if sequence.allocated_len else NOWHERE)
        if slots is None:
            return False
        self.table.write(sequence.row, sequence.allocated_len, slots)
        sequence.allocated_len += want
        self._owned += len(slots)
        return True

    def grow(self, sequence: Sequence, limit: int) -> bool:
        """Room for one more decode step, with some ahead where pages are plenty."""
        if sequence.reach <= sequence.allocated_len:
            return True
        ahead = min(sequence.allocated_len + GROWTH, limit)
        if self.available > 4 * GROWTH and ahead > sequence.reach:
            return self.extend(sequence, ahead)
        return self.extend(sequence, sequence.reach)

    def commit(self, sequence: Sequence) -> None:
        """Give the pages that are computed to their end to the tree, which shares them; locks them.

        Pages that the tree had from somebody else meanwhile are freed and replaced by the tree's.
        """
        upto = sequence.computed_len - sequence.computed_len % self.page_size
        if upto <= sequence.shared_len or sequence in self._due:
            return
        assert sequence.node is not None
        own = self.table.read(sequence.row, 0, upto)
        node, held = self.tree.insert(sequence.ids[:upto], own, sequence.salt)
        self.tree.lock(node)
        self.tree.unlock(sequence.node)
        twice = own[sequence.shared_len :] != held[sequence.shared_len : upto]
        self._owned -= int(np.count_nonzero(~twice))
        self._give(sequence, Given(own[sequence.shared_len :][twice]))
        self.table.write(sequence.row, sequence.shared_len, held[sequence.shared_len : upto])
        sequence.node, sequence.shared_len = node, upto

    def release(self, sequence: Sequence) -> None:
        """Take everything back; what was computed stays cached. Only when no peer uses the pages.

        What a step in flight computes for it is not cached, and its pages are parked.
        """
        if sequence.row == NO_ROW:
            return
        self.forgo(sequence)
        self.commit(sequence)
        self._keep_tail(sequence)
        own = self.table.read(sequence.row, sequence.shared_len, sequence.allocated_len)
        self._give(sequence, Given(own, sequence.node, sequence.row))
        sequence.row, sequence.node = NO_ROW, None
        sequence.shared_len = sequence.computed_len = sequence.allocated_len = 0
        sequence.flying = sequence.pending = sequence.copied_by = 0

    def flush(self) -> int:
        """Evict all that no sequence reads; returns the number of pages freed."""
        freed = self.tree.evict(self.tree.evictable)
        self.slots.release(freed)
        return len(freed) // self.page_size

    def account(self) -> PageAccount:
        """In pages; one of which only a part is cached is cached."""
        return PageAccount(
            total=self.slots.total // self.page_size,
            free=self.slots.free // self.page_size,
            cached=self.tree.tokens // self.page_size,
            owned=self._owned // self.page_size,
        )

    @property
    def _whole(self) -> bool:
        return self.slots.free + self.tree.tokens + self._owned == self.slots.total

    def check(self) -> None:
        """Raise AssertionError when a page is lost or has two owners."""
        self.slots.check()
        self.tree.check()
        assert self._whole, f"pages leaked: {self.account()}"

    def sound(self, *, quiet: bool) -> bool:
        """Whether every page has a place, and where all is ``quiet`` nobody holds any. O(1)."""
        if not self._whole:
            return False
        unlocked = self.tree.evictable == self.tree.tokens
        return not quiet or (unlocked and not self._owned and self.table.free == self.table.rows)

    def repair(self, sequences: Iterable[Sequence]) -> None:
        """Count everything afresh, from the tree and from what all live ``sequences`` hold.

        What nobody holds becomes free. For accounts that do not add up, which is a defect.
        """
        holding = [s for s in sequences if s.row != NO_ROW]
        owned = [self.table.read(s.row, s.shared_len, s.allocated_len) for s in holding]
        owned += [given.slots for given in self._parked]
        held = np.zeros(self.slots.total, dtype=np.bool_)
        for slots in (*owned, *(node.slots for node in self.tree.nodes())):
            held[slots] = True
        held = np.repeat(held.reshape(-1, self.page_size).any(axis=1), self.page_size)
        self.slots.reset(np.flatnonzero(~held).astype(np.int32))
        nodes = [s.node for s in holding] + [given.node for given in self._parked]
        nodes += [boundary.node for boundary in self._due.values()]
        self.tree.recount(node for node in nodes if node is not None)
        rows = [s.row for s in holding] + [given.row for given in self._parked]
        self.table.reset(rows)
        self._owned = sum(map(len, owned))

    def _keep_tail(self, sequence: Sequence) -> None:
        """Give the tree the last page of what is computed, though it is not full; locks it.

        A step in flight may still write to it, behind what the tree knows of.
        """
        start, end = sequence.shared_len, sequence.computed_len
        if start == end:
            return
        assert sequence.node is not None
        page = self.table.read(sequence.row, start, start + self.page_size)
        leaf = self.tree.keep(sequence.node, sequence.ids[start:end], page, sequence.salt)
        if leaf is not None:
            self.tree.lock(leaf)
            self.tree.unlock(sequence.node)
            self._owned -= len(page)
            sequence.node, sequence.shared_len = leaf, start + len(page)

    def _give(self, sequence: Sequence, given: Given) -> None:
        if sequence.flying or sequence.copied_by > self._collected:
            self._parked.append(replace(given, step=self._launched))
        else:
            self._free(given)

    def _free(self, given: Given) -> None:
        self.slots.release(given.slots)
        self._owned -= len(given.slots)
        if given.node is not None:
            self.tree.unlock(given.node)
        if given.row != NO_ROW:
            self.table.give_back(given.row)

    def _allocate(self, count: int, after: int) -> Int32Array | None:
        """Slots behind ``after`` where they are free, else in as few runs as possible.

        What is evicted beyond need leaves a choice. Without it a full pool would give each row
        its next page where the oldest leaf happens to end, and all later prompts get crumbs.
        """
        if count > self.slots.free:
            if count > self.available:
                return None
            slack = self.slots.total // SLACK
            self.slots.release(self.tree.evict(count - self.slots.free + slack))
        return self.slots.allocate(count, after)


def _found(sequence: Sequence, known: int) -> None:
    """So many of its tokens need not be computed."""
    sequence.computed_len = known
    if not sequence.retractions:
        sequence.cached_len = min(known, sequence.request.prompt_len)
