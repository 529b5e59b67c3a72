"""Which events happen in which phases: steered to what was seen least, or a few that say most."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.chaos.events import EVENTS, Event
from tests.chaos.hosts import Hosts
from tests.chaos.phases import Phase
from tests.chaos.stage import Result

Cell = tuple[Event, Phase]

GOAL = 5  # times that every cell is to be played
MISSES = 6  # after so many tries in a row that never saw the phase a cell is given up

# each kind of fault once, in phases where it has most to break
SHORT = (
    ("client disconnects", (Phase.SENDING, Phase.WAITING)),
    ("abort by id", (Phase.WAITING, Phase.SEVERAL)),
    ("deadline passes", (Phase.SENDING, Phase.DECODING)),
    ("prefill killed", (Phase.SENDING, Phase.WAITING)),
    ("prefill stopped and woken", (Phase.SENDING, Phase.WAITING)),
    ("decode returns on its port", (Phase.DECODING, Phase.SEVERAL)),
    ("decode cut off and healed", (Phase.SENDING, Phase.DECODING)),
    ("one way: prefill to decode", (Phase.SENDING, Phase.WAITING)),
    ("transfer fails", (Phase.SENDING, Phase.WAITING)),
    ("first router stopped and woken", (Phase.SENDING, Phase.DECODING)),
    ("router killed and restarted", (Phase.SENDING, Phase.DECODING)),
)


def absent(hosts: Hosts) -> dict[str, str]:
    """Events that cannot be played on these hosts, and why not."""
    why = {"": "", "cut": hosts.problem, "loss": hosts.problem or hosts.loss_problem}
    return {event.name: why[event.needs] for event in EVENTS if why[event.needs]}


def possible(hosts: Hosts, only: str = "") -> list[Cell]:
    """Every event in every phase; ``only``: events whose name has one of these words."""
    never, words = absent(hosts), only.split(",")
    events = [e for e in EVENTS if e.name not in never and any(w in e.name for w in words)]
    return [(event, phase) for event in events for phase in Phase]


def short(seed: int, hosts: Hosts) -> list[Cell]:
    """One phase for each event of SHORT."""
    draw, by_name = random.Random(seed), {event.name: event for event in EVENTS}
    cells = [(by_name[name], draw.choice(phases)) for name, phases in SHORT]
    draw.shuffle(cells)
    never = absent(hosts)
    return [cell for cell in cells if cell[0].name not in never]


def counts(results: Iterable[Result]) -> Counter[tuple[str, Phase]]:
    """How often each event struck a request in each phase: at most once for each time played."""
    return Counter((result.event, phase) for result in results for phase in result.hits)


def missed(results: Iterable[Result], event: str, phase: Phase) -> int:
    """How many of the last tries at a cell in a row did not see it."""
    tries = [phase in r.hits for r in results if r.event == event and r.wanted is phase]
    return next((i for i, hit in enumerate(reversed(tries)) if hit), len(tries))


def short_phases(results: Iterable[Result], event: str) -> frozenset[Phase]:
    """Those in which it has not been played often enough."""
    done = counts(results)
    return frozenset(phase for phase in Phase if done[event, phase] < GOAL)


def steered(cells: Iterable[Cell], results: list[Result], seed: int) -> Iterator[Cell]:
    """A cell that was played least, by what ``results`` has meanwhile, until all have GOAL. Of
    equals one whose event has most of them: a play hits several.
    """
    draw, left = random.Random(seed), list(cells)
    while left:
        done = counts(results)
        left = [
            (event, phase)
            for event, phase in left
            if done[event.name, phase] < GOAL and missed(results, event.name, phase) < MISSES
        ]
        if left:
            fewest = min(done[event.name, phase] for event, phase in left)
            least = [c for c in left if done[c[0].name, c[1]] == fewest]
            often = Counter(event.name for event, _ in least)
            most = max(often.values())
            yield draw.choice([cell for cell in least if often[cell[0].name] == most])
