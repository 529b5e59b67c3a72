"""Orders of the waiting queue: arrival, longest cached prefix, depth first by subtree weight.

None starves a request: nobody is overtaken by a request that came more than ``PATIENCE_S`` later,
so it starts at the latest once all are served that came before it or within that time after it.
Priorities, and retracted sequences in front, are the queue's business.
"""

from __future__ import annotations

from worker.cache.node import Node
from worker.cache.radix import RadixTree
from worker.scheduler.matches import Matches
from worker.sequence import Sequence

PATIENCE_S = 10.0  # the most by which a request that came later may have come and be preferred


class Fcfs:
    """First come, first served."""

    def __init__(self, tree: RadixTree, context_len: int) -> None:
        self._waiting: dict[Sequence, None] = {}

    def add(self, sequence: Sequence, queued_s: float) -> None:
        self._waiting[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence]

    def stale(self, now: float) -> bool:
        return False

    def arrange(self, now: float) -> list[Sequence]:
        return list(self._waiting)


class LongestPrefix:
    """Longest cached prefix first, with ageing.

    A cached token is worth ``PATIENCE_S / context_len`` seconds of waiting, and no prefix is longer
    than the context: nobody is overtaken by a request that came more than ``PATIENCE_S`` later.
    Because all age at the same pace, the order changes only when a match does.
    """

    def __init__(self, tree: RadixTree, context_len: int) -> None:
        self._matches = Matches(tree)
        self._token_s = PATIENCE_S / context_len
        self._queued: dict[Sequence, tuple[float, int]] = {}  # since when, and a running number
        self._keys: dict[Sequence, tuple[float, int]] = {}
        self._count = 0
        self._order: list[Sequence] = []  # the latest one: sorting again is nearly free
        self._new: list[Sequence] = []
        self._moved: set[Sequence] = set()

    def add(self, sequence: Sequence, queued_s: float) -> None:
        self._matches.add(sequence)
        self._queued[sequence] = queued_s, self._count
        self._count += 1
        self._new.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._matches.remove(sequence)
        self._moved.discard(sequence)
        del self._queued[sequence]
        self._keys.pop(sequence, None)

    def stale(self, now: float) -> bool:
        self._moved.update(self._matches.moved())
        return bool(self._moved)

    def arrange(self, now: float) -> list[Sequence]:
        self._moved.update(self._matches.moved())
        for sequence in self._moved:
            worth = self._token_s * self._matches.length(sequence)
            queued_s, number = self._queued[sequence]
            self._keys[sequence] = queued_s - worth, number
        self._moved.clear()
        # One that left and came back may be in both lists.
        known = dict.fromkeys(s for s in (*self._order, *self._new) if s in self._keys)
        self._new.clear()
        self._order = sorted(known, key=self._keys.__getitem__)
        return list(self._order)


class DfsWeight:
    """Depth first over the radix tree, the subtree with most waiting requests first.

    So the requests of one prefix run one after the other, while it is in the cache. Whoever has
    waited for ``PATIENCE_S`` goes first, in order of arrival.
    """

    def __init__(self, tree: RadixTree, context_len: int) -> None:
        self._tree = tree
        self._matches = Matches(tree)
        self._queued_s: dict[Sequence, float] = {}  # in order of arrival, but for retracted ones
        self._impatient = 0

    def add(self, sequence: Sequence, queued_s: float) -> None:
        self._matches.add(sequence)
        self._queued_s[sequence] = queued_s

    def remove(self, sequence: Sequence) -> None:
        self._matches.remove(sequence)
        del self._queued_s[sequence]

    def stale(self, now: float) -> bool:
        return bool(self._matches.moved()) or len(self._late(now)) > self._impatient

    def arrange(self, now: float) -> list[Sequence]:
        self._matches.moved()  # all of them are looked at below
        late = self._late(now)
        self._impatient = len(late)
        if not late:
            return self._depth_first()
        first = set(late)
        return late + [s for s in self._depth_first() if s not in first]

    def _late(self, now: float) -> list[Sequence]:
        late: list[Sequence] = []
        for sequence, queued_s in self._queued_s.items():
            if now - queued_s < PATIENCE_S:
                break
            late.append(sequence)
        return late

    def _depth_first(self) -> list[Sequence]:
        """Longer matches before shorter ones of the same path, the heavier subtree first."""
        weights, children = self._weigh()
        backwards: list[Sequence] = []
        stack = [self._tree.root]
        while stack:
            node = stack.pop()
            backwards.extend(reversed(list(self._matches.at(node))))
            heavy_first = sorted(children.get(node, ()), key=weights.__getitem__, reverse=True)
            stack.extend(heavy_first)
        return backwards[::-1]

    def _weigh(self) -> tuple[dict[Node, int], dict[Node, list[Node]]]:
        """Waiting requests in the subtree of each node that has any, and its heavy children."""
        weights: dict[Node, int] = {}
        children: dict[Node, list[Node]] = {}
        for anchor, count in self._matches.nodes().items():
            node: Node | None = anchor
            while node is not None:
                if node not in weights and node.parent is not None:
                    children.setdefault(node.parent, []).append(node)
                weights[node] = weights.get(node, 0) + count
                node = node.parent
        return weights, children
