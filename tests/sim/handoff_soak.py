"""Very many handoffs in virtual time: ``python -m tests.sim.handoff_soak --handoffs N --seed S``.

A handoff is one room, from announcement and request to its end on both sides: one run of each of
the two state machines. Rooms live in worlds of 24 (tests/support/handoff_world.py), whose troubles
are drawn too. A failure names the seed of its world; ``--world SEED`` runs that one again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from core.clock import RealClock
from tests.support.handoff_world import Trouble, World

ROOMS = 24
WORLDS_A_JOB = 50
PROGRESS_S = 15.0


def trouble_of(seed: int) -> Trouble:
    """What goes wrong in the world with this seed, from a little to very much."""
    draw = random.Random(~seed)
    return Trouble(
        cancel=draw.choice([0.0, 0.2, 0.6]),
        abort=draw.choice([0.0, 0.2, 0.6]),
        absent=draw.choice([0.0, 0.1]),
        write_fails=draw.choice([0.0, 0.1, 0.4]),
        duplicate=draw.choice([0.0, 0.3]),
        link_losses=draw.choice([0, 2, 8]),
    )


def run_world(seed: int) -> None:
    """Raises AssertionError where a law was broken."""
    World(seed, ROOMS, trouble_of(seed)).run()


def run_worlds(first: int, count: int) -> list[str]:
    """Run ``count`` worlds with seeds from ``first`` on; how the bad ones failed."""
    logging.disable(logging.CRITICAL)  # failed writes are what this is about
    failures = []
    for seed in range(first, first + count):
        try:
            run_world(seed)
        except AssertionError:
            failures.append(f"world {seed}, {trouble_of(seed)}:\n{traceback.format_exc()}")
    logging.disable(logging.NOTSET)
    return failures


def soak(handoffs: int, seed: int, processes: int) -> Iterator[tuple[int, list[str]]]:
    """Run them in several processes; handoffs so far and new failures, now and then."""
    worlds = -(-handoffs // ROOMS)
    starts = range(seed, seed + worlds, WORLDS_A_JOB)
    counts = [min(WORLDS_A_JOB, seed + worlds - start) for start in starts]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        done = 0
        for count, failures in zip(counts, pool.map(run_worlds, starts, counts), strict=True):
            done += count * ROOMS
            yield done, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.handoff_soak", description=__doc__)
    parser.add_argument("--handoffs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first world; others count on")
    parser.add_argument("--world", type=int, help="run only this one, and let it fail aloud")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.world is not None:
        run_world(args.world)
        return 0
    clock, failed, done = RealClock(), 0, 0
    started = said = clock.now()
    for done, failures in soak(args.handoffs, args.seed, args.processes):
        failed += len(failures)
        sys.stderr.writelines(itertools.chain.from_iterable((f, "\n") for f in failures))
        if clock.now() - said > PROGRESS_S:
            said = clock.now()
            sys.stderr.write(f"{done:,} handoffs, {failed} worlds failed\n")
    took = clock.now() - started
    sys.stdout.write(f"{done:,} handoffs in {took:.0f} s, {failed} worlds failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
