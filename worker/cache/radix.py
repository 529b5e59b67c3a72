"""RadixTree: token ids -> slots, in whole pages, with locks and least-recently-used leaves.

After RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", 2024). One ordered map holds every unlocked node; an access touches a path from its
deepest node up to the root, so a parent is always younger than its children, and the oldest
unlocked node is always a leaf. Finding it is O(1), without heaps or time stamps.

Every path has a salt, and paths of different salts share nothing: a node is found by its salt and
its first page. It is one tree all the same, so the oldest leaf goes first, whosever it is.

A page is one token unless told otherwise, and then matches end, and nodes are split and trimmed,
anywhere. With larger pages they do so between two pages. A path may end in a leaf that is part of
a page; and a match says who continues it for some tokens of the next page, which can be copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from core.wire import Int32Array
from worker.cache.node import EMPTY, Key, Node, common_prefix, first_page, first_token
from worker.cache.siblings import Siblings
from worker.cache.watcher import Watcher


@dataclass(frozen=True, slots=True)
class Boundary:
    """The page in which a match ends: these slots of ``node`` hold the tokens that follow."""

    node: Node
    slots: Int32Array  # fewer than a page


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix: its deepest node, and a slot for each of its tokens."""

    node: Node
    slots: Int32Array  # whole pages
    boundary: Boundary | None = None  # where pages have several tokens, and some more are known

    @property
    def length(self) -> int:
        return len(self.slots)


class RadixTree:
    """The tree owns every slot in it; whoever inserts gives them away.

    ``key(ids, at, salt)`` is where a parent keeps the child that begins with ``ids[at]``.
    """

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size  # tokens
        self.key: Callable[[Int32Array, int, str], Key] = (
            first_token if page_size == 1 else partial(first_page, page_size)
        )
        self.root = Node(None, EMPTY, EMPTY)
        self._unlocked: OrderedDict[Node, None] = OrderedDict()  # oldest first
        self.tokens = 0  # slots held, locked or not; whole pages
        self.evictable = 0  # slots held by unlocked nodes
        self.version = 0  # rises with every change of content
        self.watcher: Watcher | None = None

    def match(self, ids: Int32Array, salt: str = "") -> Match:
        """The longest cached prefix of ``ids``; splits a node where the match ends inside it."""
        node, slots = self._find(ids, salt)
        boundary = None
        if node.siblings is not None and (best := node.siblings.best(ids[len(slots) :], salt)):
            boundary = Boundary(best[0], best[0].slots[: best[1]])
        self._touch(node if boundary is None else boundary.node)
        return Match(node, slots, boundary)

    def peek(self, ids: Int32Array, salt: str = "") -> int:
        """Length of the longest cached prefix, without touching or splitting anything.

        With what a match would find of the page in which it ends.
        """
        if self.page_size == 1:
            return self._walk(ids, salt)[1]
        node, above, length = self.locate(ids, salt)
        if length - above < len(node.tokens):
            page = node.tokens[length - above :][: self.page_size]
            return length + common_prefix(page, ids[length:])
        best = node.siblings.best(ids[length:], salt) if node.siblings is not None else None
        return length + (best[1] if best else 0)

    def locate(self, ids: Int32Array, salt: str = "") -> tuple[Node, int, int]:
        """In whole pages: the node in which the prefix ends, the tokens above that, its length."""
        path, length = self._walk(ids, salt)
        return path[-1], sum(len(node.tokens) for node in path[:-1]), length

    def insert(self, ids: Int32Array, slots: Int32Array, salt: str = "") -> tuple[Node, Int32Array]:
        """Add a path of whole pages. Returns its deepest node and the tree's slots for all of it.

        Where a prefix was there already the tree keeps its own slots: those of ``slots`` that
        differ from the returned ones were not taken and stay the caller's.
        """
        assert len(ids) == len(slots)
        assert len(ids) % self.page_size == 0, len(ids)
        node, held = self._find(ids, salt)
        if len(held) == len(ids):
            self._touch(node)
            return node, held
        # Copies, because a view would pin the caller's whole array.
        rest = slice(len(held), None)
        leaf = Node(node, ids[rest].copy(), slots[rest].astype(np.int32, copy=True), salt)
        self._grow(node, leaf)
        return leaf, np.concatenate([held, leaf.slots])

    def keep(self, node: Node, ids: Int32Array, page: Int32Array, salt: str = "") -> Node | None:
        """Add a last page that is not full below ``node``, all of its slots; returns the leaf.

        None where the tree has its tokens already: then the page stays the caller's.
        """
        assert 0 < len(ids) < len(page) == self.page_size, (len(ids), len(page))
        best = node.siblings.best(ids, salt) if node.siblings is not None else None
        twin = node.children.get(self.key(ids, 0, salt))
        if best is not None and best[1] == len(ids):
            twin = best[0]
        if twin is not None:
            self._touch(twin)
            return None
        leaf = Node(node, ids.copy(), page.astype(np.int32, copy=True), salt)
        self._grow(node, leaf)
        return leaf

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
        """Free at least ``count`` slots if so many are evictable; returns them, in whole pages.

        Oldest leaves first. A leaf longer than what is still wanted loses only its last pages.
        """
        freed: list[Int32Array] = []
        left = count
        while left > 0 and self._unlocked:
            leaf = next(iter(self._unlocked))
            assert not leaf.children, "the oldest unlocked node must be a leaf"
            cut = max(0, len(leaf.slots) - left)
            cut -= cut % self.page_size
            freed.append(leaf.slots[cut:])
            left -= len(leaf.slots) - cut
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
        self._unlink(leaf.parent, leaf)
        if self.watcher is not None:
            self.watcher.removed(leaf)

    def _find(self, ids: Int32Array, salt: str) -> tuple[Node, Int32Array]:
        """The node at whose end the longest cached prefix ends, and its slots. May split."""
        path, length = self._walk(ids, salt)
        node = path[-1]
        inside = length - sum(len(above.tokens) for above in path[:-1])
        if inside < len(node.tokens):
            node = self._split(node, inside)
        slots = [n.slots for n in self._path(node)]
        return node, np.concatenate(slots) if slots else EMPTY

    def _walk(self, ids: Int32Array, salt: str) -> tuple[list[Node], int]:
        """Nodes that share pages with ``ids`` from the root on, and the shared length."""
        path, length = [self.root], 0
        size, end = self.page_size, len(ids) - self.page_size
        while length <= end:
            # self.key, written out: this is the hottest loop of the scheduler
            first = int(ids[length]) if size == 1 else ids[length : length + size].tobytes()
            child = path[-1].children.get((salt, first))
            if child is None:
                break
            shared = common_prefix(child.tokens, ids[length:])
            if size > 1:
                shared -= shared % size
            path.append(child)
            length += shared
            if shared < len(child.tokens):
                break
        return path, length

    def _grow(self, parent: Node, leaf: Node) -> None:
        self._link(parent, leaf)
        self.tokens += len(leaf.slots)
        self.evictable += len(leaf.slots)
        self._unlocked[leaf] = None
        self._touch(leaf)
        if parent.siblings is not None:
            for covered in parent.siblings.covered(leaf):
                if covered.locks == 0:  # of no more use: the next to go
                    self._unlocked.move_to_end(covered, last=False)
        self.version += 1
        if self.watcher is not None:
            self.watcher.grew(parent, leaf)

    def _link(self, parent: Node, child: Node) -> None:
        parent.children[self.key(child.tokens, 0, child.salt)] = child
        if self.page_size > 1:
            parent.siblings = parent.siblings or Siblings()
            parent.siblings.add(child)

    def _unlink(self, parent: Node, child: Node) -> None:
        del parent.children[self.key(child.tokens, 0, child.salt)]
        if parent.siblings is not None:
            parent.siblings.remove(child)
            if not parent.children:
                parent.siblings = None

    def _split(self, node: Node, at: int) -> Node:
        """Cut ``node`` after ``at`` tokens, whole pages; returns the new upper half."""
        parent = node.parent
        assert parent is not None
        assert 0 < at < len(node.tokens)
        self._unlink(parent, node)
        head = Node(parent, node.tokens[:at].copy(), node.slots[:at].copy(), node.salt)
        head.locks = node.locks
        node.tokens, node.slots = node.tokens[at:].copy(), node.slots[at:].copy()
        self._link(parent, head)
        self._link(head, node)
        node.parent = head
        if head.locks == 0:
            self._unlocked[head] = None  # younger than its child, as it must be
        self.version += 1
        if self.watcher is not None:
            self.watcher.split(head, node)
        return head

    def _touch(self, node: Node) -> None:
        paged = self.page_size > 1
        for step in self._upwards(node):  # child first: a parent ends up younger
            if step.locks == 0:
                self._unlocked.move_to_end(step)
            if paged and step.parent is not None and step.parent.siblings is not None:
                step.parent.siblings.add(step)

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
        for node in (self.root, *self.nodes()):
            assert (node.siblings is not None) == (self.page_size > 1 and bool(node.children))
            if node.siblings is not None:
                node.siblings.check(set(node.children.values()))
        age = {node: i for i, node in enumerate(self._unlocked)}
        for node in self.nodes():
            assert node.parent is not None
            self._check_pages(node)
            assert node.parent.children[self.key(node.tokens, 0, node.salt)] is node
            assert node.parent is self.root or node.parent.salt == node.salt
            assert node.locks >= sum(child.locks for child in node.children.values())
            total += len(node.slots)
            assert (node.locks == 0) == (node in age)
            if node.locks == 0:
                evictable += len(node.slots)
                assert all(age[child] < age[node] for child in node.children.values())
        assert total == self.tokens, (total, self.tokens)
        assert evictable == self.evictable, (evictable, self.evictable)

    def _check_pages(self, node: Node) -> None:
        """A node has whole pages, or is a leaf with the only one that is not full."""
        size = self.page_size
        pages = node.slots.reshape(-1, size)
        assert (pages == pages[:, :1] + np.arange(size)).all(), node.slots
        assert (pages[:, 0] % size == 0).all(), node.slots
        if len(node.tokens) == len(node.slots):
            assert len(node.tokens)
        else:
            assert 0 < len(node.tokens) < size == len(node.slots)
            assert not node.children
