"""What a run has shown, as Markdown: the coverage of events and phases, times, and failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.chaos.events import EVENTS
from tests.chaos.phases import Phase, fits
from tests.chaos.stage import Result

TIMES = ("noticed", "pause", "answered", "forgotten", "all serve", "at rest")


def cell(results: Sequence[Result], event: str, phase: Phase) -> str:
    """How often it was played in this phase, and whether all was well."""
    mine = [r for r in results if r.event == event]
    here = [r for r in mine if played(r) is phase]
    if not here:
        missed = any(played(r) is None and r.wanted is phase for r in mine)
        return "missed" if missed else "-"
    bad = sum(bool(r.problems) for r in here)
    return f"{bad} of {len(here)} FAILED" if bad else f"{len(here)}"


def played(result: Result) -> Phase | None:
    """The phase that an event counts for; None where the request was never seen in a clear one."""
    if result.seen is not None and fits(result.seen, result.wanted):
        return result.wanted
    return result.seen


def coverage(results: Sequence[Result]) -> str:
    """Event by phase: how often, all checks passed unless it says otherwise."""
    rows = [
        (event.name, *(cell(results, event.name, phase) for phase in Phase)) for event in EVENTS
    ]
    return table(("event", *(phase.value for phase in Phase)), rows)


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
