"""Watcher: who wants to know how a radix tree changes."""

from __future__ import annotations

from typing import Protocol

from worker.cache.node import Node


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
