"""RadixTree: token ids -> slots, at token granularity, with locks and least-recently-used leaves.

After RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", 2024). One ordered map holds every unlocked node; an access touches a path from its
deepest node up to the root, so a parent is always younger than its children, and the oldest
unlocked node is always a leaf. Finding it is O(1), without heaps or time stamps.

Every path has a salt, and paths of different salts share nothing: a node is found by its salt and
its first token. It is one tree all the same, so the oldest leaf goes first, whosever it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from core.wire import Int32Array

EMPTY: Int32Array = np.empty(0, dtype=np.int32)
EMPTY.setflags(write=False)

Key = tuple[str, int]  # salt, first token


class Node:
    """A run of tokens below its parent. ``locks`` counts the sequences that read it or below."""

    __slots__ = ("children", "locks", "parent", "salt", "slots", "tokens")

    def __init__(
        self, parent: Node | None, tokens: Int32Array, slots: Int32Array, salt: str = ""
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.salt = salt
        self.children: dict[Key, Node] = {}
        self.locks = 0

    @property
    def key(self) -> Key:
        """Where its parent keeps it."""
        return self.salt, int(self.tokens[0])


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix: its deepest node, and a slot for each of its tokens."""

    node: Node
    slots: Int32Array

    @property
    def length(self) -> int:
        return len(self.slots)


class Watcher(Protocol):
    """Told of each change of a tree's shape, right after it. May not change the tree."""

    def grew(self, parent: Node, child: Node) -> None:
        """``child``, a leaf, is new."""
        ...

    def split(self, head: Node, tail: Node) -> None:
        """``tail`` lost its first tokens to ``head``, its new parent."""
        ...

    def trimmed(self, leaf: Node) -> None:
        """The leaf lost its last tokens."""
        ...

    def removed(self, leaf: Node) -> None:
        """The leaf is gone from its parent; it still knows it."""
        ...


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


class RadixTree:
    """The tree owns every slot in it; whoever inserts gives them away."""

    def __init__(self) -> None:
        self.root = Node(None, EMPTY, EMPTY)
        self._unlocked: OrderedDict[Node, None] = OrderedDict()  # oldest first
        self.tokens = 0  # slots held, locked or not
        self.evictable = 0  # slots held by unlocked nodes
        self.version = 0  # rises with every change of content
        self.watcher: Watcher | None = None

    def match(self, ids: Int32Array, salt: str = "") -> Match:
        """The longest cached prefix of ``ids``; splits a node where the match ends inside it."""
        path, length = self._walk(ids, salt)
        node = path[-1]
        inside = length - sum(len(above.tokens) for above in path[:-1])
        if inside < len(node.tokens):
            node = self._split(node, inside)
        slots = [n.slots for n in self._path(node)]
        self._touch(node)
        return Match(node, np.concatenate(slots) if slots else EMPTY)

    def peek(self, ids: Int32Array, salt: str = "") -> int:
        """Length of the longest cached prefix, without touching or splitting anything."""
        return self._walk(ids, salt)[1]

    def locate(self, ids: Int32Array, salt: str = "") -> tuple[Node, int, int]:
        """Like ``peek``: the node in which the prefix ends, the tokens above that, its length."""
        path, length = self._walk(ids, salt)
        return path[-1], sum(len(node.tokens) for node in path[:-1]), length

    def insert(self, ids: Int32Array, slots: Int32Array, salt: str = "") -> tuple[Node, Int32Array]:
        """Add a path. Returns its deepest node and the tree's slots for all of ``ids``.

        Where a prefix was there already the tree keeps its own slots: those of ``slots`` that
        differ from the returned ones were not taken and stay the caller's.
        """
        assert len(ids) == len(slots)
        found = self.match(ids, salt)
        if found.length == len(ids):
            return found.node, found.slots
        rest = slice(found.length, None)
        # Copies, because a view would pin the caller's whole array.
        leaf = Node(found.node, ids[rest].copy(), slots[rest].astype(np.int32, copy=True), salt)
        found.node.children[leaf.key] = leaf
        self.tokens += len(leaf.slots)
        self.evictable += len(leaf.slots)
        self._unlocked[leaf] = None
        self._touch(leaf)
        self.version += 1
        if self.watcher is not None:
            self.watcher.grew(found.node, leaf)
        return leaf, np.concatenate([found.slots, leaf.slots])

    def lock(self, node: Node) -> None:
        """Keep the path to ``node`` from being evicted."""
        for step in self._upwards(node):
            if step.locks == 0:
                del self._unlocked[step]
                self.evictable -= len(step.slots)
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one ``lock`` of the same node."""
        for step in self._upwards(node):
            step.locks -= 1
            assert step.locks >= 0, "a node was unlocked more often than locked"
            if step.locks == 0:
                self._unlocked[step] = None
                self.evictable += len(step.slots)

    def evict(self, count: int) -> Int32Array:
        """Remove at least ``count`` tokens if so many are evictable; returns the freed slots.

        Oldest leaves first. A leaf longer than what is still wanted loses only its tail.
        """
        freed: list[Int32Array] = []
        left = count
        while left > 0 and self._unlocked:
            leaf = next(iter(self._unlocked))
            assert not leaf.children, "the oldest unlocked node must be a leaf"
            cut = max(0, len(leaf.tokens) - left)
            freed.append(leaf.slots[cut:])
            left -= len(leaf.tokens) - cut
            if cut:
                leaf.tokens, leaf.slots = leaf.tokens[:cut].copy(), leaf.slots[:cut].copy()
                if self.watcher is not None:
                    self.watcher.trimmed(leaf)
            else:
                self._remove(leaf)
        out = np.concatenate(freed) if freed else EMPTY
        self.tokens -= len(out)
        self.evictable -= len(out)
        self.version += bool(freed)
        return out

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        del self._unlocked[leaf]
        del leaf.parent.children[leaf.key]
        if self.watcher is not None:
            self.watcher.removed(leaf)

    def _walk(self, ids: Int32Array, salt: str) -> tuple[list[Node], int]:
        """Nodes that share a prefix with ``ids`` from the root on, and the shared length."""
        path, length = [self.root], 0
        while length < len(ids):
            child = path[-1].children.get((salt, int(ids[length])))
            if child is None:
                break
            shared = common_prefix(child.tokens, ids[length:])
            path.append(child)
            length += shared
            if shared < len(child.tokens):
                break
        return path, length

    def _split(self, node: Node, at: int) -> Node:
        """Cut ``node`` after ``at`` tokens; returns the new upper half."""
        parent = node.parent
        assert parent is not None
        assert 0 < at < len(node.tokens)
        head = Node(parent, node.tokens[:at].copy(), node.slots[:at].copy(), node.salt)
        head.locks = node.locks
        node.tokens, node.slots = node.tokens[at:].copy(), node.slots[at:].copy()
        parent.children[head.key] = head
        head.children[node.key] = node
        node.parent = head
        if head.locks == 0:
            self._unlocked[head] = None  # younger than its child, as it must be
        self.version += 1
        if self.watcher is not None:
            self.watcher.split(head, node)
        return head

    def _touch(self, node: Node) -> None:
        for step in self._upwards(node):  # child first: a parent ends up younger
            if step.locks == 0:
                self._unlocked.move_to_end(step)

    def _upwards(self, node: Node) -> Iterator[Node]:
        step: Node | None = node
        while step is not None and step is not self.root:
            yield step
            step = step.parent

    def _path(self, node: Node) -> list[Node]:
        return list(self._upwards(node))[::-1]

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def recount(self, locked: Iterable[Node]) -> None:
        """Count tokens and locks afresh: of one lock on each node of ``locked``, and no others."""
        nodes = list(self.nodes())
        for node in nodes:
            node.locks = 0
        for node in locked:
            for step in self._upwards(node):
                step.locks += 1
        free = {node for node in nodes if node.locks == 0}
        self._unlocked = OrderedDict.fromkeys(n for n in self._unlocked if n in free)
        missing = [n for n in reversed(nodes) if n in free and n not in self._unlocked]
        self._unlocked.update(dict.fromkeys(missing))
        for node in missing:
            self._touch(node)
        self.tokens = sum(len(node.slots) for node in nodes)
        self.evictable = sum(len(node.slots) for node in free)

    def check(self) -> None:
        """Raise AssertionError unless counts, links, locks and ages agree."""
        total = evictable = 0
        age = {node: i for i, node in enumerate(self._unlocked)}
        for node in self.nodes():
            assert node.parent is not None
            assert len(node.tokens) == len(node.slots) > 0
            assert node.parent.children[node.key] is node
            assert node.parent is self.root or node.parent.salt == node.salt
            assert node.locks >= sum(child.locks for child in node.children.values())
            total += len(node.slots)
            assert (node.locks == 0) == (node in age)
            if node.locks == 0:
                evictable += len(node.slots)
                assert all(age[child] < age[node] for child in node.children.values())
        assert total == self.tokens, (total, self.tokens)
        assert evictable == self.evictable, (evictable, self.evictable)
