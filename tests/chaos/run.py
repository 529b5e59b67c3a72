"""One run on the hosts that are there: ``python -m tests.chaos`` lays them out and calls this."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from core import log
from tests.chaos import report, schedule
from tests.chaos.cluster import Cluster, running
from tests.chaos.hosts import Hosts
from tests.chaos.load import client
from tests.chaos.schedule import Cell
from tests.chaos.stage import Result, Stage


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most, of the long form")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="a few events, under two minutes")
    parser.add_argument("--only", default="", help="events whose names have this, or this,...")
    parser.add_argument("--hosts", type=Hosts.parse, default=Hosts(), help=argparse.SUPPRESS)
    return parser.parse_args(words)


async def play(args: argparse.Namespace) -> list[Result]:
    """Play the schedule; every result, failed or not."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as controls:
        async with (
            running(args.hosts, Path(controls)) as cluster,
            client(cluster.grpc, cluster.clock) as main,
        ):
            stage = Stage(cluster, main, random.Random(args.seed), alone=args.short)
            try:
                await stage.learn()
                for event, phase in _cells(args, cluster, results):
                    also = schedule.short_phases(results, event.name)
                    short = {phase} if args.short else also
                    results.append(await stage.play(event, phase, short))
                    say(_line(results[-1], cluster.clock.now()))
            finally:
                await stage.close()
            say(f"file descriptors grew by at most {stage.descriptors.worst} in any life")
    return results


def _cells(args: argparse.Namespace, cluster: Cluster, results: list[Result]) -> Iterator[Cell]:
    """Until everything was played often enough, or the time is up."""
    if args.short:
        for cell in schedule.short(args.seed, args.hosts):
            yield cell
            if results[-1].seen is None:
                yield cell
        return
    until = cluster.clock.now() + 60 * args.minutes
    cells = schedule.steered(schedule.possible(args.hosts, args.only), results, args.seed)
    yield from itertools.takewhile(lambda _: cluster.clock.now() < until, cells)


def _line(result: Result, now: float) -> str:
    notes = ", ".join(f"{name} {value:.2f}" for name, value in result.notes.items())
    also = sorted(result.hits - {result.seen})
    seen = "never seen" if result.seen is None else ", ".join((result.seen, *also))
    verdict = "; ".join(result.problems) or "ok"
    if result.excused:
        verdict += f" but for {dict(result.excused)}"
    return f"{now:9.1f} {result.event} / {result.wanted.value} ({seen}): {verdict} [{notes}]"


def summary(results: list[Result], args: argparse.Namespace) -> str:
    """The whole report."""
    parts = ["", report.coverage(results), "", report.times(results), "", report.detection(results)]
    if not args.short and not args.only:
        parts += report.short_of(schedule.GOAL, results, args.hosts)
    else:
        parts += report.not_played(args.hosts)
    streams = sum(result.streams for result in results)
    failed = report.failures(results)
    excused = sum(result.excused.total() for result in results)
    parts.append(
        f"{len(results)} events, {streams} streams compared (of them {excused} ended early with a"
        f" reason while no rank or no place was left), {len(failed)} problems."
    )
    parts += failed
    return "\n".join(parts)


def main() -> int:
    args = arguments()
    log.setup("chaos", "error")
    results = asyncio.run(play(args))
    say(summary(results, args))
    return 1 if report.failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
