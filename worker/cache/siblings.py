"""Siblings: the children of one node by their first token, for matches that end inside a page.

With pages of several tokens a child is found by its whole first page. Where no child has that page,
some may still share its first tokens: those are copied. Thousands of children may begin alike (one
question each after the same three words), so only the ones used last are looked at.
"""

from __future__ import annotations

from itertools import islice

from core.wire import Int32Array
from worker.cache.node import Node, common_prefix

LOOKED_AT = 16  # of the children with the same first token


class Siblings:
    """Children by salt and first token; of equal ones those used last come last."""

    def __init__(self) -> None:
        self._alike: dict[tuple[str, int], dict[Node, None]] = {}

    def add(self, child: Node) -> None:
        """A new child, or one used again."""
        alike = self._alike.setdefault(_start(child), {})
        alike.pop(child, None)
        alike[child] = None

    def remove(self, child: Node) -> None:
        start = _start(child)
        del self._alike[start][child]
        if not self._alike[start]:
            del self._alike[start]

    def best(self, ids: Int32Array, salt: str) -> tuple[Node, int] | None:
        """The child that shares most first tokens with ``ids``, and how many; None where none does.

        Of the ``LOOKED_AT`` used last, and of equally good ones the latest.
        """
        if not len(ids):
            return None
        best: tuple[Node, int] | None = None
        for child in islice(reversed(self._alike.get((salt, int(ids[0])), {})), LOOKED_AT):
            shared = common_prefix(child.tokens, ids)
            if best is None or shared > best[1]:
                best = child, shared
        return best

    def covered(self, child: Node) -> list[Node]:
        """Of those used last the ones that ``child`` begins with; they have no full page."""
        alike = islice(reversed(self._alike[_start(child)]), LOOKED_AT)
        return [
            other
            for other in alike
            if len(other.tokens) < min(len(other.slots), len(child.tokens))
            and common_prefix(other.tokens, child.tokens) == len(other.tokens)
        ]

    def check(self, children: set[Node]) -> None:
        """Raise AssertionError unless it has exactly these."""
        mine = [child for alike in self._alike.values() for child in alike]
        assert len(mine) == len(children)
        assert set(mine) == children
        assert all(alike for alike in self._alike.values())


def _start(child: Node) -> tuple[str, int]:
    return child.salt, int(child.tokens[0])
