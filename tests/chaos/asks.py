"""Every request of a run. Dumps tell them apart by the lengths of their prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.chaos.cluster import RANK_CONTEXT
from tests.chaos.load import Ask


def _drawn(name: str, first: int, count: int, tokens: int, n: int = 1) -> Iterator[Ask]:
    """Requests with prompts of ``first`` tokens and a little more."""
    return (Ask.drawn(name, length, length, tokens, n) for length in range(first, first + count))


# Those that events are aimed at. The first three keep their phase until something fails.
DECODING = tuple(_drawn("decoding", 104, 2, 400))
SEVERAL = tuple(_drawn("several", 107, 1, 300, 3))
WAITING = tuple(_drawn("waiting", 303, 4, 30))
FILLERS = tuple(_drawn("filler", 601, 8, 30))  # a rank prefills one of them at a time
PROBES = (*DECODING, *SEVERAL, *WAITING, *FILLERS)

# the router lets it through, and every rank refuses it
TOO_LONG = Ask.drawn("too long", 11, RANK_CONTEXT + 50, 4)
BACKGROUND = (
    *(Ask.drawn("load", i, 20 + 31 * i, 40 + 15 * i) for i in range(8)),
    Ask.drawn("load of three", 10, 64, 90, 3),
    TOO_LONG,
)
FRESH = Ask.drawn("fresh", 8, 50, 8)
ASKS = (*PROBES, *BACKGROUND, FRESH)


def by_length(asks: Iterable[Ask]) -> dict[int, Ask]:
    """By the lengths of the prompts, which must all differ."""
    asks = tuple(asks)
    found = {len(ask.prompt): ask for ask in asks}
    assert len(found) == len(asks), "a request is told by the length of its prompt"
    return found
