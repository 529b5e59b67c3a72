"""Node: a run of tokens in the radix tree, and the keys by which nodes are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from core.wire import Int32Array

if TYPE_CHECKING:
    from worker.cache.siblings import Siblings

EMPTY: Int32Array = np.empty(0, dtype=np.int32)
EMPTY.setflags(write=False)

Key = tuple[str, int | bytes]  # salt, and the first token; or the ids of the first page


class Node:
    """A run of tokens below its parent. ``locks`` counts the sequences that read it or below.

    It holds whole pages. With pages of several tokens a leaf may have a last page that is not
    full: then that is all it has, and there are more ``slots``, a page of them, than ``tokens``.
    """

    __slots__ = ("children", "locks", "parent", "salt", "siblings", "slots", "tokens")

    def __init__(
        self, parent: Node | None, tokens: Int32Array, slots: Int32Array, salt: str = ""
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.salt = salt
        self.children: dict[Key, Node] = {}
        self.siblings: Siblings | None = None  # among its children; pages of several tokens only
        self.locks = 0


def first_token(ids: Int32Array, at: int, salt: str) -> Key:
    """The key of a node that begins with ``ids[at]``, where a page is a token."""
    return salt, int(ids[at])


def first_page(size: int, ids: Int32Array, at: int, salt: str) -> Key:
    """The key of a node that begins with ``ids[at]``, by its first ``size`` tokens."""
    return salt, ids[at : at + size].tobytes()


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
