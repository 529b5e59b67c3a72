"""One run from beginning to end: warm up, send, count, print, write."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import plot, report, stats, workloads
from bench.client import Access, Client, connect
from bench.config import BenchConfig
from bench.outcome import Outcome
from bench.progress import Progress
from bench.run import DEFAULT_CONCURRENCY, Runner, arrivals
from bench.sessions import Session
from core.clock import Clock, RealClock
from core.errors import ConfigError, PreflightError

ALL_FAILED = 1


class Files(NamedTuple):
    """What is written besides the table on stdout."""

    json: Path | None = None  # a line is appended
    requests: Path | None = None  # a line for each request, written anew
    plot: Path | None = None


class Measured(NamedTuple):
    """What a run leaves behind."""

    model: str
    outcomes: list[Outcome]
    epoch_s: float
    client_cpu_share: float


def execute(config: BenchConfig, files: Files, access: Access) -> int:
    """Run it; the exit code: 1 when every request failed.

    Raises OperatorError before anything is sent where a file, a library or the endpoint is wrong.
    """
    _check(files)
    sessions = workloads.build(config)
    measured = asyncio.run(_measure(config, sessions, access, RealClock()))
    result = stats.summarise(measured.outcomes, config.targets)
    whole = report.make(
        config,
        result,
        model=measured.model,
        epoch_s=measured.epoch_s,
        client_cpu_share=measured.client_cpu_share,
    )
    print(report.table(whole))
    if files.json is not None:
        with files.json.open("ab") as lines:
            lines.write(report.json_line(whole))
    if files.requests is not None:
        files.requests.write_bytes(b"".join(report.request_lines(measured.outcomes)))
    if files.plot is not None:
        plot.draw(whole, measured.outcomes, files.plot)
    return 0 if result.ok else ALL_FAILED


def _check(files: Files) -> None:
    """A run must not be lost to a file that cannot be written."""
    if files.plot is not None:
        plot.require(files.plot)
    for path in (files.json, files.requests):
        if path is None:
            continue
        try:
            path.open("ab").close()
        except OSError as error:
            raise ConfigError(f"bench: {path} cannot be written: {error}") from error


async def _measure(
    config: BenchConfig, sessions: Sequence[Session], access: Access, clock: Clock
) -> Measured:
    async with connect(config, clock, access) as client:
        await client.find_model()
        await _warm_up(client, config, clock)
        total = sum(len(session.turns) for session in sessions)
        bar = Progress(total, sys.stderr, clock)
        runner = Runner(
            client, config, clock, on_outcome=lambda outcome: bar.advance(failed=not outcome.ok)
        )
        epoch_s, start_s, cpu_s = clock.epoch(), clock.now(), time.process_time()
        try:
            outcomes = await _play(runner, config, sessions)
        finally:
            bar.close()
        share = (time.process_time() - cpu_s) / max(clock.now() - start_s, 1e-9)
        return Measured(client.model, outcomes, epoch_s, share)


async def _warm_up(client: Client, config: BenchConfig, clock: Clock) -> None:
    """Send requests that do not count; PreflightError where none is answered."""
    sessions = workloads.warmup(config)
    if not sessions:
        return
    outcomes = await Runner(client, config, clock).closed_loop(sessions, _concurrency(config))
    if not any(outcome.ok for outcome in outcomes):
        raise PreflightError(
            f"bench: no warm-up request was answered ({outcomes[0].error}): "
            "check --url, --model and the lengths, or skip it with --warmup 0"
        )


async def _play(runner: Runner, config: BenchConfig, sessions: Sequence[Session]) -> list[Outcome]:
    offsets = arrivals(config, sessions)
    if offsets is None:
        return await runner.closed_loop(sessions, _concurrency(config))
    return await runner.open_loop(sessions, offsets)


def _concurrency(config: BenchConfig) -> int:
    return config.concurrency or DEFAULT_CONCURRENCY
