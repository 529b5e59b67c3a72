"""What a run has shown, as Markdown: the coverage of events and phases, times, and failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.chaos.events import EVENTS
from tests.chaos.hosts import Hosts
from tests.chaos.phases import Phase
from tests.chaos.schedule import absent, counts, missed, possible
from tests.chaos.stage import Result

TIMES = (
    "noticed", "rerouted", "pause", "answered", "forgotten", "router back", "all serve", "at rest",
)  # fmt: skip
SILENT = ("stopped", "cut off", "one way")  # in the names of events that nobody is told of


def cell(results: Sequence[Result], event: str, phase: Phase) -> str:
    """How often it struck a request in this phase, and whether all was well."""
    mine = [r for r in results if r.event == event]
    here = [r for r in mine if phase in r.hits]
    if not here:
        return "missed" if missed(mine, event, phase) else "-"
    bad = sum(bool(r.problems) for r in here)
    return f"{bad} of {len(here)} FAILED" if bad else f"{len(here)}"


def coverage(results: Sequence[Result]) -> str:
    """Event by phase: how often, all checks passed unless it says otherwise."""
    rows = [
        (event.name, *(cell(results, event.name, phase) for phase in Phase)) for event in EVENTS
    ]
    return table(("event", *(phase.value for phase in Phase)), rows)


def not_played(hosts: Hosts) -> list[str]:
    """One line for each event that cannot be played on these hosts."""
    return [f"Not played: {name}, because {why}." for name, why in absent(hosts).items()]


def short_of(goal: int, results: Sequence[Result], hosts: Hosts) -> list[str]:
    """One line for each event or cell that was played less often, and why."""
    done, lines = counts(results), not_played(hosts)
    for event, phase in possible(hosts):
        if (often := done[event.name, phase]) < goal:
            tries = missed(results, event.name, phase)
            why = f"not seen in the last {tries} tries" if tries else "the time was up"
            lines.append(f"Played {often} times of {goal}: {event.name}, {phase.value}: {why}.")
    return lines


def detection(results: Sequence[Result]) -> str:
    """The longest times until a silent loss was noticed, and until a stream was carried on."""
    words = []
    for name in ("noticed", "rerouted"):
        silent = [r for r in results if name in r.notes and any(k in r.event for k in SILENT)]
        if silent:
            most = max(silent, key=lambda r: r.notes[name])
            words.append(f"{name} after {most.notes[name]:.2f} s ({most.event}, {most.wanted})")
    return f"Silent losses, at most: {', '.join(words)}." if words else "No loss was silent."


def times(results: Sequence[Result]) -> str:
    """For each event the median and the longest of what was measured, in seconds."""
    rows = []
    for event in EVENTS:
        mine = [r.notes for r in results if r.event == event.name]
        rows.append((event.name, *(_spread([n[t] for n in mine if t in n]) for t in TIMES)))
    return table(("event", *TIMES), rows)


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.1f} / {ordered[-1]:.1f}"


def failures(results: Iterable[Result]) -> list[str]:
    """One line for each problem."""
    return [
        f"{r.event}, {r.wanted.value} (seen: {r.seen.value if r.seen else 'never'}): {problem}"
        for r in results
        for problem in r.problems
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, its columns as wide as they need."""
    lines = [head, *rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(word.ljust(w) for word, w in zip(row, widths, strict=True)) + " |"
        for row in lines
    )
