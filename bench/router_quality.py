"""How good are routing decisions? Traces over eight simulated ranks, a policy in front.

    python -m bench.router_quality FOLDER [--trace NAME ...] [--policy NAME ...]

FOLDER holds ``NAME.jsonl`` in the form of bench/sim/traces.py. The policies of this router are the
real ones with the real index; the others are rules of other routers, see bench/sim/anchors.py.
Everything runs in virtual time: the same numbers on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.sim import anchors, traces
from bench.sim.engine import EngineModel
from bench.sim.fleet import Replay, Served, SimRank
from core.clock import VirtualClock
from core.config import CacheAwareConfig
from core.metrics import NullSink
from router.policy.base import POLICIES, Policy, PolicyContext

RANKS = 8


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Where a trace loads the ranks without drowning them."""

    speed_up: float  # arrivals come so many times as fast as written
    capacity: int  # KV tokens of a rank


POINTS = {
    "random": OperatingPoint(1.5, 120_000),
    "agent": OperatingPoint(3.0, 150_000),
    "chat": OperatingPoint(2.0, 120_000),
    "shared": OperatingPoint(3.0, 120_000),
    "mc_synth": OperatingPoint(1.6, 600_000),
    "mc_conv": OperatingPoint(1.0, 600_000),
}

ANCHORS: dict[str, Callable[[], Policy]] = {
    "least_requests": anchors.LeastRequests,
    "threshold": anchors.Threshold,
    "block_cost": anchors.BlockCost,
}


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one trace."""

    trace: str
    policy: str
    hit_rate: float  # of prompt tokens
    ttft_mean_s: float
    ttft_p99_s: float
    e2e_p50_s: float

    def row(self) -> str:
        return (
            f"| {self.trace} | {self.policy} | {self.hit_rate:.3f} | {self.ttft_mean_s:.3f} "
            f"| {self.ttft_p99_s:.2f} | {self.e2e_p50_s:.2f} |"
        )


HEADER = (
    "| trace | policy | hit rate | mean TTFT, s | p99 TTFT, s | p50 latency, s |\n"
    "|---|---|---|---|---|---|"
)


def make_policy(name: str, clock: VirtualClock) -> Policy:
    """A policy of this router, or an anchor, by name."""
    if name in ANCHORS:
        return ANCHORS[name]()
    context = PolicyContext(CacheAwareConfig(), clock, NullSink())
    return POLICIES.load(name)(context).prefill


def measure(
    name: str, trace: Sequence[traces.TraceRequest], point: OperatingPoint, policy: str
) -> Result:
    """Replay one trace under one policy."""
    faster = [
        msgspec.structs.replace(r, t=r.t / point.speed_up) if r.parent is None else r for r in trace
    ]
    clock = VirtualClock()
    model = EngineModel(capacity=point.capacity)
    ranks = [SimRank(number, model) for number in range(RANKS)]
    served = Replay(faster, ranks, make_policy(policy, clock), clock).run()
    return summary(name, policy, served)


def summary(trace: str, policy: str, served: Sequence[Served]) -> Result:
    """The numbers of a table row."""
    ttft = sorted(s.ttft_s for s in served)
    e2e = sorted(s.e2e_s for s in served)
    return Result(
        trace=trace,
        policy=policy,
        hit_rate=sum(s.cached_tokens for s in served) / sum(s.prompt_tokens for s in served),
        ttft_mean_s=sum(ttft) / len(ttft),
        ttft_p99_s=ttft[int(0.99 * len(ttft))],
        e2e_p50_s=e2e[len(e2e) // 2],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table in markdown. 0 also where there are no traces to run: it says so."""
    names = [*POLICIES, *ANCHORS]
    parser = argparse.ArgumentParser(prog="python -m bench.router_quality", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, nargs="?", help="with NAME.jsonl files")
    parser.add_argument("--trace", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--policy", nargs="+", choices=names, default=names)
    given = parser.parse_args(arguments)
    there = [t for t in given.trace if given.folder and (given.folder / f"{t}.jsonl").is_file()]
    if not there:
        print(f"skipped: no traces ({', '.join(given.trace)}) in {given.folder}")
        return 0
    print(HEADER)
    for name in there:
        trace = traces.read(given.folder / f"{name}.jsonl")
        for policy in given.policy:
            print(measure(name, trace, POINTS[name], policy).row(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
