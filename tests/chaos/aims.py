"""What an event is aimed at, and whom it hits with that: chosen so that it hits most."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.wire import RankId
from tests.chaos.cluster import RANKS, REPLICAS
from tests.chaos.phases import Phase, Sighting, covered, fits


class Aim(StrEnum):
    """What of a request's way an event strikes."""

    PREFILL = "its prefill rank"
    DECODE = "its decode rank"
    BOTH = "its ranks"
    EITHER = "one of its ranks"
    LINK = "the link between its ranks"
    EVERYTHING = "every rank, or what all requests need"
    CALLER = "its caller"
    ROUTER = "the router of the stage's own requests"


OWN = (Aim.CALLER, Aim.ROUTER)  # strike the stage's own requests only
ROLES = {
    Aim.PREFILL: ("prefill",),
    Aim.DECODE: ("decode",),
    Aim.EITHER: ("prefill", "decode"),
}


@dataclass(frozen=True)
class Shot:
    """A request in a phase, what is struck with it, and the phases that it counts for."""

    seen: Sighting  # has a prefill rank: any where it is past that
    role: str  # whose rank is struck, of those events that strike one
    hit: tuple[Sighting, ...]  # all requests that are
    covers: frozenset[Phase]

    def rank(self, role: str) -> RankId:
        """The rank of this role."""
        rank = self.seen.prefill if role == "prefill" else self.seen.decode
        assert rank is not None
        return rank


def best(
    aim: Aim,
    wanted: Phase,
    crowd: Sequence[Sighting],
    own: Collection[int],
    short: Collection[Phase],
    draw: random.Random,
) -> Shot | None:
    """The shot that covers most of ``short``, of equals a drawn one; None: nobody is in the phase.

    ``crowd``: all requests in clear phases; ``own``: lengths of the prompts of the stage's own, at
    which alone it is aimed.
    """
    shots = list(_shots(aim, wanted, crowd, own))
    if not shots:
        return None
    most = max(len(shot.covers.intersection(short)) for shot in shots)
    return draw.choice([s for s in shots if len(s.covers.intersection(short)) == most])


def _shots(
    aim: Aim, wanted: Phase, crowd: Sequence[Sighting], own: Collection[int]
) -> Iterator[Shot]:
    mine = [seen for seen in crowd if seen.prompt in own]
    among = mine if aim in OWN else crowd
    for aimed in mine:
        if not fits(aimed.phase, wanted):
            continue
        for seen in _placed(aimed):
            for role in ROLES.get(aim, ("",)):
                hit = tuple(o for o in among if o is aimed or _hits(aim, seen, role, o))
                yield Shot(seen, role, hit, covered(wanted, aimed, hit))


def _placed(seen: Sighting) -> Iterator[Sighting]:
    """With a prefill rank: its own, or each where it is past that."""
    if seen.prefill is not None:
        yield seen
        return
    for replica in range(REPLICAS):
        yield dataclasses.replace(seen, prefill=RankId(group="prefill", replica=replica))


def _hits(aim: Aim, seen: Sighting, role: str, other: Sighting) -> bool:
    """Whether what strikes the one request strikes the other as well."""
    assert seen.prefill is not None
    if aim in OWN:
        return True
    if aim is Aim.LINK:
        return other.between(seen.prefill, seen.decode)
    victims = {"prefill": {seen.prefill}, "decode": {seen.decode}, "": {seen.prefill, seen.decode}}
    return other.hit(set(RANKS) if aim is Aim.EVERYTHING else victims[role])
