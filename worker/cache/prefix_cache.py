"""PrefixCache: the only memory object the scheduler sees: begin, extend, commit, release.

Who owns the pages of a sequence:

    [0, shared_len)               the tree, locked through ``sequence.node``
    [shared_len, allocated_len)   the sequence

``commit`` moves the boundary up to what has been computed; ``release`` gives everything back.
"""

from __future__ import annotations

from core.wire import Int32Array, PageAccount
from worker.cache.radix import RadixTree
from worker.cache.request_table import RequestTable
from worker.cache.slots import SlotAllocator
from worker.sequence import NO_ROW, Sequence

GROWTH = 16  # slots a decoding sequence takes at once, so that its pages stay consecutive


class PrefixCache:
    """Tree, allocator and request table, always changed together."""

    def __init__(self, pages: int, rows: int, context_len: int) -> None:
        self.tree = RadixTree()
        self.slots = SlotAllocator(pages)
        self.table = RequestTable(rows, context_len)
        self._owned = 0

    @property
    def available(self) -> int:
        """Pages that can be had now, by eviction if need be."""
        return self.slots.free + self.tree.evictable

    def begin(self, sequence: Sequence, limit: int) -> None:
        """Give the sequence a row and lock the longest cached prefix of its first ``limit`` tokens.

        Cached under its salt, that is. A sequence that samples needs the logits of its last token,
        so its limit is one less than its length.
        """
        assert sequence.row == NO_ROW, sequence.rid
        found = self.tree.match(sequence.ids[:limit], sequence.salt)
        self.tree.lock(found.node)
        sequence.node = found.node
        sequence.row = self.table.take()
        self.table.write(sequence.row, 0, found.slots)
        sequence.shared_len = sequence.computed_len = sequence.allocated_len = found.length
        if not sequence.retractions:
            sequence.cached_len = min(found.length, sequence.request.prompt_len)

    def extend(self, sequence: Sequence, to: int) -> bool:
        """Own pages for tokens up to ``to``; False, and nothing changed, when there are none."""
        want = to - sequence.allocated_len
        if want <= 0:
            return True
        slots = self._allocate(want)
        if slots is None:
            return False
        self.table.write(sequence.row, sequence.allocated_len, slots)
        sequence.allocated_len = to
        self._owned += len(slots)
        return True

    def grow(self, sequence: Sequence, limit: int) -> bool:
        """Room for one more decode step, with some ahead where pages are plenty."""
        if sequence.length <= sequence.allocated_len:
            return True
        ahead = min(sequence.allocated_len + GROWTH, limit)
        if self.slots.free > 4 * GROWTH and ahead > sequence.length:
            return self.extend(sequence, ahead)
        return self.extend(sequence, sequence.length)

    def commit(self, sequence: Sequence) -> None:
        """Give the computed pages to the tree, which shares them; keeps them locked.

        Pages that the tree had from somebody else meanwhile are freed and replaced by the tree's.
        """
        upto = sequence.computed_len
        if upto <= sequence.shared_len:
            return
        assert sequence.node is not None
        own = self.table.read(sequence.row, 0, upto)
        node, held = self.tree.insert(sequence.ids[:upto], own, sequence.salt)
        self.tree.lock(node)
        self.tree.unlock(sequence.node)
        twice = own[sequence.shared_len :] != held[sequence.shared_len : upto]
        self.slots.release(own[sequence.shared_len :][twice])
        self._owned -= upto - sequence.shared_len
        self.table.write(sequence.row, sequence.shared_len, held[sequence.shared_len : upto])
        sequence.node, sequence.shared_len = node, upto

    def release(self, sequence: Sequence) -> None:
        """Take everything back; what was computed stays cached.

        Only when no step in flight and no peer uses the pages any more.
        """
        if sequence.row == NO_ROW:
            return
        self.commit(sequence)
        own = self.table.read(sequence.row, sequence.shared_len, sequence.allocated_len)
        self.slots.release(own)
        self._owned -= len(own)
        assert sequence.node is not None
        self.tree.unlock(sequence.node)
        self.table.give_back(sequence.row)
        sequence.row, sequence.node = NO_ROW, None
        sequence.shared_len = sequence.computed_len = sequence.allocated_len = 0

    def flush(self) -> int:
        """Evict all that no sequence reads; returns the number of pages freed."""
        freed = self.tree.evict(self.tree.evictable)
        self.slots.release(freed)
        return len(freed)

    def account(self) -> PageAccount:
        return PageAccount(
            total=self.slots.total, free=self.slots.free, cached=self.tree.tokens, owned=self._owned
        )

    def check(self) -> None:
        """Raise AssertionError when a page is lost or has two owners."""
        self.slots.check()
        self.tree.check()
        assert self.account().whole, f"pages leaked: {self.account()}"

    def _allocate(self, count: int) -> Int32Array | None:
        if count > self.slots.free:
            if count > self.available:
                return None
            self.slots.release(self.tree.evict(count - self.slots.free))
        return self.slots.allocate(count)
