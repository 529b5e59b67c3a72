"""A run's result: a table for people, a JSON line for programs, a line for each request."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import msgspec

from bench.config import BenchConfig
from bench.outcome import Outcome
from bench.stats import Spread, Summary

SCHEMA = 1  # counts up when a field of Report changes its meaning or goes
_LATE_MS = 20.0  # from here on the table says that the load generator was late
_BUSY = 0.8  # of one core: from here on it measures itself


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the load generator ran."""

    system: str
    cpus: int
    memory_gib: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON line of a run."""

    schema: int = SCHEMA
    time: str  # of the start, ISO 8601, UTC
    model: str
    planned: int  # requests of the workload; ``result`` has how many ended
    interrupted: bool  # Ctrl-C ended the run: what was on its way is not in ``result``
    client_cpu_share: float  # of one core, while requests ran
    versions: dict[str, str]
    machine: Machine
    config: BenchConfig
    result: Summary


def make(
    config: BenchConfig,
    result: Summary,
    *,
    model: str,
    epoch_s: float,
    client_cpu_share: float,
    planned: int,
    interrupted: bool = False,
) -> Report:
    """Put the result beside what is needed to repeat it."""
    return Report(
        time=datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="seconds"),
        model=model,
        planned=planned,
        interrupted=interrupted,
        client_cpu_share=client_cpu_share,
        versions=_versions(),
        machine=_machine(),
        config=config,
        result=result,
    )


def json_line(report: Report) -> bytes:
    """One line, rounded to what a clock can tell."""
    return msgspec.json.encode(_rounded(msgspec.to_builtins(report))) + b"\n"


def request_lines(outcomes: Iterable[Outcome]) -> Iterable[bytes]:
    """A line for each request, in the order of their ends; times count from the first start."""
    ended = sorted(outcomes, key=lambda outcome: outcome.end_s)
    zero = min(outcome.start_s for outcome in ended)
    for o in ended:
        line = {
            "session": o.session,
            "turn": o.turn,
            "start_s": o.start_s - zero,
            "late_s": o.lag_s,
            "ttft_s": o.ttft_s if o.ok else None,
            "tpot_s": o.tpot_s,
            "e2e_s": o.e2e_s,
            "chunk_s": [at_s - zero for at_s in o.chunk_s],
            "prompt_tokens": o.prompt_tokens,
            "cached_tokens": o.cached_tokens,
            "output_tokens": o.output_tokens,
            "finish": o.finish,
            "error": o.error,
        }
        yield msgspec.json.encode(_rounded(line)) + b"\n"


def table(report: Report) -> str:
    """What is printed at the end of a run."""
    result = report.result
    rows = [("", "mean", "p50", "p90", "p99")]
    rows += [
        _row("TTFT ms", result.ttft_ms),
        _row("TPOT ms", result.tpot_ms),
        _row("ITL ms", result.itl_ms),
        _row("e2e ms", result.e2e_ms),
    ]
    lines = [name.ljust(16) + "".join(cell.rjust(10) for cell in cells) for name, *cells in rows]
    facts = [f"{name.ljust(16)}  {fact}" for name, fact in _facts(report)]
    return "\n".join([f"{report.model} on {report.config.url}", "", *lines, "", *facts])


def _row(name: str, values: Spread | None) -> tuple[str, str, str, str, str]:
    if values is None:
        return (name, "-", "-", "-", "-")
    mean, p50, p90, p99 = (
        f"{value:.1f}" for value in (values.mean, values.p50, values.p90, values.p99)
    )
    return (name, mean, p50, p90, p99)


def _facts(report: Report) -> Iterable[tuple[str, str]]:
    result = report.result
    yield (
        "requests",
        f"{result.ok} ok, {result.failed} failed in {result.duration_s:.1f} s: "
        f"{result.requests_per_s:.2f}/s, {result.in_flight:.1f} in flight on average",
    )
    if report.interrupted:
        yield "interrupted", f"after {result.requests} of {report.planned} requests"
    yield "prompt tokens", _prompt(result)
    chunks = " (chunks: the server sends no usage)" if result.output_tokens_from == "chunks" else ""
    yield "output tokens", f"{result.output_tokens}{chunks}: {result.output_tokens_per_s:.1f}/s"
    if result.total_tokens_per_s is not None:
        yield "all tokens", f"{result.total_tokens_per_s:.1f}/s"
    if result.goodput is not None:
        good = result.goodput
        yield "goodput", f"{good.share:.1%} of the requests met the targets: {good.per_s:.2f}/s"
    for text, count in result.errors.items():
        yield "error", f"{count} x {text}"
    if result.late_p99_ms > _LATE_MS:
        yield "note", f"requests were sent late: up to {result.late_p99_ms:.0f} ms (p99)"
    if report.client_cpu_share > _BUSY:
        yield "note", f"the load generator used {report.client_cpu_share:.0%} of its core"


def _prompt(result: Summary) -> str:
    if not result.ok:
        return "-"
    if result.prompt_tokens is None:
        return "unknown: the server sends no usage"
    cached = result.cached_share
    share = "cached share unknown" if cached is None else f"{cached:.1%} cached"
    return f"{result.prompt_tokens}, {share}"


def _rounded(value: Any) -> Any:  # opaque: JSON
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("antiphon", "httpx"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            versions[package] = "not installed"
    return versions


def _machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        system=platform.platform(),
        cpus=os.cpu_count() or 0,
        memory_gib=round(memory / 2**30, 1),
    )
