"""One run on the hosts that are there: ``python -m tests.chaos`` lays them out and calls this."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from core import log
from tests.chaos import report, schedule
from tests.chaos.burst import burst
from tests.chaos.cluster import Cluster, running
from tests.chaos.hosts import Hosts
from tests.chaos.load import client
from tests.chaos.phases import Phase
from tests.chaos.schedule import Cell
from tests.chaos.stage import Result, Stage

TRIES = 2  # to see a request in the phase that is wanted


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="of the long form")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="a few events, about 90 s in all")
    parser.add_argument("--only", default="", help="events whose name has this")
    parser.add_argument("--lab", default="", help=argparse.SUPPRESS)
    parser.add_argument("--names", default="", help=argparse.SUPPRESS)
    parser.add_argument("--problem", default="", help=argparse.SUPPRESS)
    return parser.parse_args(words)


async def play(args: argparse.Namespace, hosts: Hosts) -> list[Result]:
    """Play the schedule; every result, failed or not."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as controls:
        async with (
            running(hosts, Path(controls)) as cluster,
            client(cluster.grpc, cluster.clock) as main,
        ):
            stage = Stage(cluster, main, random.Random(args.seed))
            await stage.learn()
            for event, phase in _cells(args, hosts, cluster):
                for _ in range(TRIES):
                    results.append(await stage.play(event, phase))
                    say(_line(results[-1], cluster.clock.now()))
                    if results[-1].seen is not None:
                        break
            results.append(await _burst(cluster, stage))
            say(_line(results[-1], cluster.clock.now()))
            say(f"file descriptors grew by at most {stage.descriptors.worst} in any life")
    return results


def _cells(args: argparse.Namespace, hosts: Hosts, cluster: Cluster) -> Iterable[Cell]:
    """Until the time is up; a round that covers everything is not cut short by the clock alone."""
    if args.short:
        yield from schedule.short(args.seed, hosts.can_cut)
        return
    until = cluster.clock.now() + 60 * args.minutes
    cells = schedule.long(args.seed, hosts.can_cut)
    for event, phase in itertools.takewhile(lambda _: cluster.clock.now() < until, cells):
        if args.only in event.name:
            yield event, phase


async def _burst(cluster: Cluster, stage: Stage) -> Result:
    result = Result("burst of 4 x capacity", Phase.QUEUED, seen=Phase.QUEUED)
    notes, result.problems = await burst(cluster)
    result.notes |= notes
    await stage.settle(result)
    return result


def _line(result: Result, now: float) -> str:
    notes = ", ".join(f"{name} {value:.2f}" for name, value in result.notes.items())
    seen = "never seen" if result.seen is None else result.seen.value
    verdict = "; ".join(result.problems) or "ok"
    if result.excused:
        verdict += f" but for {dict(result.excused)}"
    return f"{now:9.1f} {result.event} / {result.wanted.value} ({seen}): {verdict} [{notes}]"


def summary(results: list[Result], hosts: Hosts) -> str:
    """The whole report."""
    parts = ["", report.coverage(results), "", report.times(results), ""]
    if hosts.problem:
        parts.append(f"Not played: links cut off, because {hosts.problem}.")
    streams = sum(result.streams for result in results)
    failed = report.failures(results)
    excused = sum(result.excused.total() for result in results)
    parts.append(
        f"{len(results)} events, {streams} streams compared (of them {excused} ended early with a"
        f" reason while no rank was left), {len(failed)} problems."
    )
    parts += failed
    return "\n".join(parts)


def main() -> int:
    args = arguments()
    log.setup("chaos", "error")
    hosts = Hosts(args.lab, tuple(filter(None, args.names.split(","))), args.problem)
    results = asyncio.run(play(args, hosts))
    say(summary(results, hosts))
    return 1 if report.failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
