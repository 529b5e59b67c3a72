"""PrefixCache under random use, by steps that run late and peers that write, against plain lists.

The KV of a token is a hash of all tokens up to it and of the salt, and rubbish where a page is
free. So a page that is given away early, shared by mistake, or copied late or twice is found.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fake_runner import RUBBISH, PoisonedSlots
from tests.support.requests import request
from worker.cache import siblings
from worker.cache.copies import SlotCopy
from worker.cache.node import Node
from worker.cache.prefix_cache import PrefixCache
from worker.scheduler.admission import Admission, Limits
from worker.sequence import NO_ROW, Sequence

CONTEXT = 50
TAKES = [0, 0, 1, 7, CONTEXT]  # tokens of one sequence in one step
STEM = [(i * i) % 5 % 2 for i in range(36)]


def kv_of(one: Sequence, upto: int) -> list[int]:
    """What must lie in the slots of its first tokens."""
    salt = zlib.crc32(one.salt.encode())
    return [zlib.crc32(one.ids[: i + 1].tobytes(), salt) for i in range(upto)]


def shared(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@dataclass
class Flight:
    """A launched step: what it copies, and what it writes for whom."""

    copies: tuple[SlotCopy, ...]
    writes: list[tuple[Sequence, int, np.ndarray, list[int]]]  # and its life, slots, values


class PagedCacheMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([1, 4, 16]), pages=st.sampled_from([4, 6, 4000]))
    def build(self, size: int, pages: int) -> None:
        tokens = max(pages * size, -(-CONTEXT // size) * size)
        self.cache = cache = PrefixCache(tokens, 12, CONTEXT, size)
        self.size, self.plenty = size, pages == 4000
        self.kv = np.full(tokens, RUBBISH, np.int64)
        cache.slots = PoisonedSlots(tokens, self.kv, size)
        self.admission = Admission(cache, Limits(6, 100, CONTEXT))
        self.live: list[Sequence] = []
        self.lives: dict[Sequence, int] = {}
        self.flights: deque[Flight] = deque()
        self.known: list[tuple[str, list[int]]] = []  # left in the cache by those that are gone
        self.all = patch.object(siblings, "LOOKED_AT", 1000)
        self.all.start()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.all.stop()
        for one in list(self.live):
            self.leave(one)
        while self.flights:
            self.collect()
        self.cache.check()
        assert self.cache.sound(quiet=True)
        self.cache.flush()
        assert self.cache.slots.free == self.cache.slots.total

    # --- what happens -----------------------------------------------------------------------

    @rule(
        prefix=st.integers(0, 36),
        own=st.lists(st.integers(2, 3), min_size=1, max_size=5),
        salt=st.sampled_from(["", "", "", "mine"]),
        whole=st.booleans(),
        then=st.sampled_from(["", "copy", "compute", "leave"]),
    )
    def begin(self, prefix: int, own: list[int], salt: str, whole: bool, then: str) -> None:
        """``whole``: a decode rank's, which may find all of its prompt."""
        if not self.cache.table.free:
            return
        ids = STEM[:prefix] + own
        one = Sequence.of(request("r", ids, 8, salt=salt), "router", CONTEXT)
        limit = one.length - (not whole)
        in_tree, in_all = self.longest_in_tree(one, limit), self.longest_known(one, limit)
        assert self.cache.tree.peek(one.ids[:limit], salt) == in_tree
        if self.plenty:
            assert in_tree == in_all
        if self.admission.reserve(one, self.live, one.length, limit):
            found = one.computed_len
            forgone = one not in self.cache._due
            assert found == (in_tree // self.size * self.size if forgone else in_tree)
            assert not forgone or not self.plenty or in_tree % self.size == 0
            assert one.cached_len == found
            self.live.append(one)
            self.lives[one] = 0
            if then == "copy" and len(self.flights) < 2:
                self.fly({})
            if then in ("compute", "leave"):
                self.compute(one)
            if then == "leave":
                self.leave(one)
        else:
            assert not self.plenty
            assert one.row == NO_ROW

    def compute(self, one: Sequence) -> None:
        """All of its prompt."""
        while self.flights:
            self.collect()
        self.fly({one: one.length})
        self.collect()

    @precondition(lambda self: self.live and len(self.flights) < 2)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        self.fly({one: data.draw(st.sampled_from(TAKES)) for one in self.live})

    def fly(self, most: dict[Sequence, int]) -> None:
        """Launch a step that computes up to so many tokens of each."""
        writes = []
        for one in most:
            if take := min(most[one], one.length - one.planned_len):
                start, end = one.planned_len, one.planned_len + take
                slots = self.cache.table.read(one.row, start, end)
                writes.append((one, self.lives[one], slots, kv_of(one, end)[start:]))
        copies = self.cache.launched()
        for one, _, slots, _ in writes:
            one.flying += len(slots)
        self.flights.append(Flight(copies, writes))

    @precondition(lambda self: self.flights)
    @rule()
    def collect(self) -> None:
        flight = self.flights.popleft()
        taken = set(self.taken().tolist())
        for copy in flight.copies:
            assert taken.issuperset(copy.target.tolist()), "the page was freed before the copy ran"
            assert (self.kv[copy.source] != RUBBISH).all()
            self.kv[copy.target] = self.kv[copy.source]
        for _, _, slots, values in flight.writes:
            self.kv[slots] = values
        self.cache.collected()
        for one, life, slots, _ in flight.writes:
            if self.lives.get(one) == life and one.row != NO_ROW:
                one.computed_len += len(slots)
                one.flying -= len(slots)
                self.cache.commit(one)
                self.look(one)

    @precondition(lambda self: any(s.computed_len < s.length and not s.flying for s in self.live))
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """A peer writes what is missing, whatever steps are in flight."""
        waits = [s for s in self.live if s.computed_len < s.length and not s.flying]
        one = data.draw(st.sampled_from(waits))
        start = one.computed_len
        slots = self.cache.table.read(one.row, start, one.length)
        self.kv[slots] = kv_of(one, one.length)[start:]
        if one not in self.cache._due:  # else the engine has a step to launch first
            one.computed_len = one.length
            self.cache.commit(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 3))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        one = data.draw(st.sampled_from(self.live))
        for _ in range(min(tokens, len(one.tokens) - 1 - one.length)):
            one.append(1)
            if not self.cache.grow(one, len(one.tokens) - 1):
                one.length -= 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: not self.plenty and self.flights)
    @rule()
    def flush(self) -> None:
        self.cache.flush()

    def leave(self, one: Sequence) -> None:
        upto = one.shared_len if one in self.cache._due else one.computed_len
        self.known.append((one.salt, one.ids[:upto].tolist()))
        self.live.remove(one)
        del self.lives[one]
        self.cache.release(one)

    def taken(self) -> np.ndarray:
        """The slots of everybody who owns pages."""
        cache = self.cache
        owned = [cache.table.read(s.row, s.shared_len, s.allocated_len) for s in self.live]
        owned += [given.slots for given in cache._parked]
        owned += [node.slots for node in cache.tree.nodes()]
        return np.concatenate(owned) if owned else np.empty(0, np.int32)

    # --- the reference ----------------------------------------------------------------------

    def longest_in_tree(self, one: Sequence, limit: int) -> int:
        """Token by token, over every path of the tree."""
        ids = one.ids[:limit].tolist()
        paths = (self.path_of(node) for node in self.cache.tree.nodes() if node.salt == one.salt)
        return max((shared(path, ids) for path in paths), default=0)

    def longest_known(self, one: Sequence, limit: int) -> int:
        """The same, over what was ever computed: all of those gone, whole pages of the others."""
        ids = one.ids[:limit].tolist()
        running = [
            (s.salt, s.ids[: s.computed_len // self.size * self.size].tolist())
            for s in self.live
            if s not in self.cache._due
        ]
        alike = (path for salt, path in [*self.known, *running] if salt == one.salt)
        return max((shared(path, ids) for path in alike), default=0)

    @staticmethod
    def path_of(node: Node) -> list[int]:
        pieces: list[int] = []
        step: Node | None = node
        while step is not None:
            pieces[:0] = step.tokens.tolist()
            step = step.parent
        return pieces

    def look(self, one: Sequence) -> None:
        """What counts as computed is there, and is its own."""
        slots = self.cache.table.read(one.row, 0, one.computed_len)
        assert self.kv[slots].tolist() == kv_of(one, one.computed_len)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, taken = self.cache, self.taken()
        cache.check()
        assert len(set(taken.tolist())) == len(taken) == cache.slots.total - cache.slots.free
        for one in self.live:
            pages = cache.table.read(one.row, 0, one.allocated_len).reshape(-1, self.size)
            assert (pages == pages[:, :1] + np.arange(self.size)).all()
            assert (pages[:, 0] % self.size == 0).all()
            shared_slots = cache.table.read(one.row, 0, one.shared_len).tolist()
            assert shared_slots == self.slots_above(one.node)

    @staticmethod
    def slots_above(node: Node | None) -> list[int]:
        slots: list[int] = []
        while node is not None:
            slots[:0] = node.slots.tolist()
            node = node.parent
        return slots


PagedCacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPagedCache = PagedCacheMachine.TestCase
