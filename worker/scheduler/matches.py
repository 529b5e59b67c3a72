"""Matches: how much of each waiting sequence is cached, kept up to date as the tree changes.

In whole pages: what a match finds beyond them, at its boundary, says little about the order.

Each sequence is anchored at the node in which its longest cached prefix ends. The tree tells of
every change of its shape, and only the sequences anchored where it changed are looked at again:
looking up 10,000 waiting prompts afresh in every step would take tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worker.cache.node import Key, Node, common_prefix
from worker.cache.radix import RadixTree
from worker.sequence import Sequence

Group = dict[Sequence, None]  # an ordered set


@dataclass(slots=True)
class Anchor:
    """Where one sequence's match ends: in ``node``, whose path above has ``above`` tokens."""

    node: Node
    above: int
    length: int  # tokens matched: above < length <= above + len(node.tokens), but at the root 0
    limit: int  # tokens that a match may cover


class Matches:
    """The one watcher of a tree. ``length(s)`` equals a fresh ``locate`` at any time."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        tree.watcher = self
        self._anchors: dict[Sequence, Anchor] = {}
        # By node, and by the key of the child that would carry the match on (None: there is none).
        self._at: dict[Node, dict[Key | None, Group]] = {}
        self._moved: Group = {}

    def add(self, sequence: Sequence) -> None:
        limit = sequence.reusable_len
        node, above, length = self._tree.locate(sequence.ids[:limit], sequence.salt)
        self._put(sequence, Anchor(node, above, length, limit))

    def remove(self, sequence: Sequence) -> None:
        self._take(sequence)
        self._moved.pop(sequence, None)

    def length(self, sequence: Sequence) -> int:
        """Cached tokens of one that was added."""
        return self._anchors[sequence].length

    def moved(self) -> Iterable[Sequence]:
        """Those whose match changed since the last call, new ones among them."""
        moved, self._moved = self._moved, {}
        return moved

    def at(self, node: Node) -> Iterable[Sequence]:
        """The sequences anchored at one node."""
        return (sequence for group in self._at.get(node, {}).values() for sequence in group)

    def nodes(self) -> dict[Node, int]:
        """Every node with anchored sequences, and how many."""
        return {node: sum(map(len, groups.values())) for node, groups in self._at.items()}

    # --- what the tree tells ------------------------------------------------------------------

    def grew(self, parent: Node, child: Node) -> None:
        """Whoever waited for this child at its parent's end matches more."""
        key = self._tree.key(child.tokens, 0, child.salt)
        for sequence in tuple(self._at.get(parent, {}).get(key, ())):
            anchor = self._anchors[sequence]
            end = anchor.above + len(parent.tokens)
            if anchor.length == end:
                more = common_prefix(child.tokens, sequence.ids[end : anchor.limit])
                more -= more % self._tree.page_size
                self._move(sequence, Anchor(child, end, end + more, anchor.limit))

    def split(self, head: Node, tail: Node) -> None:
        """``tail`` was the whole node: no match changes, but where it ends may."""
        for sequence in tuple(self.at(tail)):
            anchor = self._take(sequence)
            cut = anchor.above + len(head.tokens)
            if anchor.length <= cut:
                anchor.node = head
            else:
                anchor.above = cut
            self._settle(sequence, anchor)

    def trimmed(self, leaf: Node) -> None:
        """Matches cannot reach beyond what is left of it."""
        for sequence in tuple(self.at(leaf)):
            anchor = self._anchors[sequence]
            end = anchor.above + len(leaf.tokens)
            if anchor.length > end:
                self._move(sequence, Anchor(leaf, anchor.above, end, anchor.limit))

    def removed(self, leaf: Node) -> None:
        """Matches end with its parent."""
        parent = leaf.parent
        assert parent is not None
        for sequence in tuple(self.at(leaf)):
            anchor = self._anchors[sequence]
            above = anchor.above - len(parent.tokens)
            self._move(sequence, Anchor(parent, above, anchor.above, anchor.limit))

    # --- keeping the index --------------------------------------------------------------------

    def _move(self, sequence: Sequence, to: Anchor) -> None:
        self._take(sequence)
        self._put(sequence, to)

    def _put(self, sequence: Sequence, anchor: Anchor) -> None:
        self._settle(sequence, anchor)
        self._moved[sequence] = None

    def _settle(self, sequence: Sequence, anchor: Anchor) -> None:
        self._anchors[sequence] = anchor
        groups = self._at.setdefault(anchor.node, {})
        groups.setdefault(self._next_key(sequence, anchor), {})[sequence] = None

    def _take(self, sequence: Sequence) -> Anchor:
        anchor = self._anchors.pop(sequence)
        groups, key = self._at[anchor.node], self._next_key(sequence, anchor)
        del groups[key][sequence]
        if not groups[key]:
            del groups[key]
            if not groups:
                del self._at[anchor.node]
        return anchor

    def _next_key(self, sequence: Sequence, anchor: Anchor) -> Key | None:
        """Of the child with its next page; None where the page would reach beyond its limit."""
        if anchor.length + self._tree.page_size > anchor.limit:
            return None
        return self._tree.key(sequence.tokens, anchor.length, sequence.salt)
