"""One run from beginning to end: warm up, send, count, print, write."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
INTERRUPTED = 130  # as a shell counts SIGINT


class Files(NamedTuple):
    """What is written besides the table on stdout."""

    json: Path | None = None  # a line is appended
    requests: Path | None = None  # a line for each request, written anew
    plot: Path | None = None


class Measured(NamedTuple):
    """What a run leaves behind."""

    model: str
    outcomes: Sequence[Outcome]  # of the requests that had ended
    epoch_s: float
    client_cpu_share: float
    planned: int  # requests of the workload
    interrupted: bool


def execute(config: BenchConfig, files: Files, access: Access) -> int:
    """Run it; the exit code: 1 when every request failed, 130 when Ctrl-C ended the run.

    Ctrl-C keeps the result of the requests that had ended by then; a second one ends at once.
    Raises OperatorError before anything is sent where a file, a library or the endpoint is wrong.
    """
    _check(files)
    sessions = workloads.build(config)
    measured = asyncio.run(_measure(config, sessions, access, RealClock()))
    if not measured.outcomes:
        print("antiphon: interrupted before a request had ended: no result", file=sys.stderr)
        return INTERRUPTED
    result = stats.summarise(measured.outcomes, config.targets)
    whole = report.make(
        config,
        result,
        model=measured.model,
        epoch_s=measured.epoch_s,
        client_cpu_share=measured.client_cpu_share,
        planned=measured.planned,
        interrupted=measured.interrupted,
    )
    print(report.table(whole))
    if files.json is not None:
        with files.json.open("ab") as lines:
            lines.write(report.json_line(whole))
    if files.requests is not None:
        files.requests.write_bytes(b"".join(report.request_lines(measured.outcomes)))
    if files.plot is not None:
        plot.draw(whole, measured.outcomes, files.plot)
    if measured.interrupted:
        return INTERRUPTED
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
            interrupted = await _until_interrupted(runner, config, sessions)
        finally:
            bar.close()
        share = (time.process_time() - cpu_s) / max(clock.now() - start_s, 1e-9)
        return Measured(client.model, runner.outcomes, epoch_s, share, total, interrupted)


async def _until_interrupted(
    runner: Runner, config: BenchConfig, sessions: Sequence[Session]
) -> bool:
    """Play all sessions, or those before Ctrl-C, which leaves what is on its way; was there one?"""
    playing = asyncio.create_task(_play(runner, config, sessions))
    with _on_interrupt() as pressed:
        stopping = asyncio.create_task(pressed.wait())
        try:
            await asyncio.wait((playing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                await playing
            return not playing.done()
        finally:
            playing.cancel()
            stopping.cancel()
            await asyncio.gather(playing, stopping, return_exceptions=True)


@contextmanager
def _on_interrupt() -> Iterator[asyncio.Event]:
    """The event that Ctrl-C sets while the block runs, instead of ending the program."""
    pressed, loop = asyncio.Event(), asyncio.get_running_loop()

    def press() -> None:
        loop.remove_signal_handler(signal.SIGINT)  # a second one ends at once
        pressed.set()

    loop.add_signal_handler(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        loop.remove_signal_handler(signal.SIGINT)


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


async def _play(runner: Runner, config: BenchConfig, sessions: Sequence[Session]) -> None:
    offsets = arrivals(config, sessions)
    if offsets is None:
        await runner.closed_loop(sessions, _concurrency(config))
    else:
        await runner.open_loop(sessions, offsets)


def _concurrency(config: BenchConfig) -> int:
    return config.concurrency or DEFAULT_CONCURRENCY
