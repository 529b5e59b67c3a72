"""Which events happen in which phases: everything in a drawn order, or a few that say most."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.chaos.events import EVENTS, Event
from tests.chaos.phases import Phase

Cell = tuple[Event, Phase]

# about one and a half minutes: each kind of fault once, in phases where it has most to break
SHORT = (
    ("client disconnects", (Phase.SENDING, Phase.WAITING)),
    ("abort by id", (Phase.WAITING, Phase.SEVERAL)),
    ("deadline passes", (Phase.SENDING, Phase.DECODING)),
    ("prefill killed", (Phase.SENDING, Phase.WAITING)),
    ("prefill stopped and woken", (Phase.SENDING, Phase.WAITING)),
    ("decode killed", (Phase.DECODING, Phase.SEVERAL)),
    ("decode cut off and healed", (Phase.SENDING, Phase.DECODING)),
    ("transfer fails", (Phase.SENDING, Phase.WAITING)),
    ("router killed", (Phase.SENDING, Phase.DECODING)),
)


def possible(can_cut: bool) -> list[Cell]:
    """Every event in every phase."""
    return [(e, phase) for e in EVENTS for phase in e.phases if can_cut or not e.cuts]


def short(seed: int, can_cut: bool) -> list[Cell]:
    """One phase for each event of SHORT."""
    draw, by_name = random.Random(seed), {event.name: event for event in EVENTS}
    cells = [(by_name[name], draw.choice(phases)) for name, phases in SHORT]
    draw.shuffle(cells)
    return [cell for cell in cells if can_cut or not cell[0].cuts]


def long(seed: int, can_cut: bool) -> Iterator[Cell]:
    """All of them in a drawn order, again and again in other orders."""
    draw, cells = random.Random(seed), possible(can_cut)
    while True:
        draw.shuffle(cells)
        yield from cells
