"""What the scheduler costs: a step beside a busy device, and ordering a long queue.

    python -m bench.micro.scheduler [--rows 64 256] [--step-ms 20] [--steps 200] [--waiting 10000]

Prints two Markdown tables of milliseconds. The device is a thread that takes ``step-ms`` off the
CPU for each plan, one plan after the other, as an accelerator with a queue does. What a step takes
beyond that is the engine's.
"""

from __future__ import annotations

import argparse
import gc
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence as Arguments
from dataclasses import dataclass, field
from random import Random

import numpy as np

from bench.micro.timing import Times, load_line
from core.clock import RealClock
from core.rpc.events import Submitted
from core.wire import Incarnation, Int32Array, RankId, Route, SamplingParams, TokenRequest, pack_ids
from worker.cache.prefix_cache import PrefixCache
from worker.cache.radix import RadixTree
from worker.engine import Engine
from worker.plan import StepPlan, StepResult
from worker.roles.unified import UnifiedRole
from worker.scheduler.admission import Limits
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.waiting import ORDERS, WaitingQueue
from worker.sequence import Sequence
from worker.streams import Streams

CONTEXT = 4096
PROMPT = 64
PREFIX = 256  # shared tokens of the requests in a long queue


@dataclass(slots=True)
class Ticket:
    """A launched plan."""

    plan: StepPlan
    launched_s: float
    done: threading.Event = field(default_factory=threading.Event)


class TimedDevice:
    """Implements Runner: every plan takes the same time, and none of the CPU's."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._queue: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._clock = RealClock()
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def launch(self, plan: StepPlan) -> Ticket:
        ticket = Ticket(plan, self._clock.now())
        self._queue.put(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        ticket.done.wait()
        count = len(ticket.plan.samples)
        return StepResult((1,) * count, (None,) * count)

    def _run(self) -> None:
        never, free_s = threading.Event(), 0.0
        while True:
            ticket = self._queue.get()
            free_s = max(free_s, ticket.launched_s) + self._step_s
            never.wait(max(0.0, free_s - self._clock.now()))
            ticket.done.set()


def _request(rid: str, ids: Int32Array, output: int) -> TokenRequest:
    here = Incarnation(rank=RankId(group="unified"), endpoint="-", nonce="-")
    return TokenRequest(
        rid=rid,
        token_ids=pack_ids(ids),
        prompt_len=len(ids),
        params=SamplingParams(max_new_tokens=output, temperature=0.0, ignore_eos=True),
        route=Route(room=0, prefill=here, decode=here),
    )


def decode_steps_s(rows: int, step_s: float, steps: int, *, overlap: bool) -> list[float]:
    """Times from one collected step to the next, of steps that decode ``rows`` sequences."""
    cache = PrefixCache(rows * (PROMPT + 2 * steps + 64), 2 * rows, CONTEXT)
    limits = Limits(max_running=rows, step_tokens=rows * PROMPT, context_len=CONTEXT)
    scheduler, streams, clock = Scheduler(cache, limits), Streams(), RealClock()
    role = UnifiedRole(scheduler, streams, frozenset())
    device = TimedDevice(step_s)
    engine = Engine(role, scheduler, device, streams, lambda peer: None, overlap=overlap)
    for row in range(rows):
        ids = np.arange(row * PROMPT, (row + 1) * PROMPT, dtype=np.int32)
        engine.handle(Submitted("router", _request(f"r{row}", ids, 2 * steps)))
    for _ in range(5):
        _turn(engine, clock)
    gc.disable()  # as the step loop does
    ends = [clock.now()]
    for _ in range(steps):
        _turn(engine, clock)
        ends.append(clock.now())
    gc.enable()
    return list(np.diff(ends))


def _turn(engine: Engine, clock: RealClock) -> None:
    engine.recorder.begin("events")
    engine.step(clock.now())
    engine.recorder.end(engine.facts())


def order_s(schedule: str, waiting: int, steps: int = 60) -> list[float]:
    """Times of putting a long queue in order, one in each step.

    In between one prefix becomes cached, another one is evicted, a request comes and one starts.
    """
    draw, tree = Random(1), RadixTree()
    shared = [np.array([i, *draw.choices(range(1000), k=PREFIX - 1)], np.int32) for i in range(500)]

    def one(rid: str) -> Sequence:
        ids = np.append(draw.choice(shared), draw.choices(range(1000), k=3)).astype(np.int32)
        return Sequence.of(_request(rid, ids, 1), "router", CONTEXT)

    def cache(index: int) -> None:
        first = index * PREFIX
        tree.insert(shared[index], np.arange(first, first + PREFIX, dtype=np.int32))

    for index in range(len(shared) // 2):
        cache(index)
    line = WaitingQueue(ORDERS.load(schedule)(tree, CONTEXT))
    for number in range(waiting):
        line.push(one(f"r{number}"))
    line.arrange(0.0)
    times = []
    for step in range(steps):
        line.push(one(f"n{step}"))
        began = time.perf_counter()
        cache(len(shared) // 2 + step)  # the tree tells the matches: part of the price
        tree.evict(PREFIX)
        line.arrange(step * 0.05)
        times.append(time.perf_counter() - began)
        line.remove(next(iter(line)))
    return times


def step_table(given: argparse.Namespace) -> Iterator[str]:
    """Steps beside a busy device. The last column says what the engine adds at the median."""
    yield f"A step of a device that takes {given.step_ms:g} ms. {load_line()}\n"
    yield "| rows | overlap | least | quartile | median | beyond the device |"
    yield "|---:|---|---:|---:|---:|---:|"
    step_s = given.step_ms / 1e3
    for rows in given.rows:
        for overlap in (False, True):
            times = Times.of(decode_steps_s(rows, step_s, given.steps, overlap=overlap))
            beyond = f"{times.median / step_s - 1:.1%}"
            yield f"| {rows} | {'on' if overlap else 'off'} | {times.cells(1e-3)} | {beyond} |"


def order_table(waiting: int) -> Iterator[str]:
    """Ordering the queue in each step, while the tree changes."""
    yield f"Ordering {waiting:,} waiting requests.\n"
    yield "| order | least | quartile | median |\n|---|---:|---:|---:|"
    for schedule in ORDERS:
        yield f"| {schedule} | {Times.of(order_s(schedule, waiting)).cells(1e-3)} |"


def main(argv: Arguments[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.micro.scheduler")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=10_000)
    given = parser.parse_args(argv)
    for line in step_table(given):
        print(line, flush=True)
    print()
    for line in order_table(given.waiting):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
