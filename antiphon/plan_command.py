"""``antiphon plan`` and ``antiphon check``: look before starting anything."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from antiphon import words
from core.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.plan import Plan
    from core.config import ClusterConfig

COLUMNS = ("rank", "where", "threads", "dtype", "weights", "KV pool", "of tokens", "context")
GIB = 2**30


NOT_FITTING = 1  # exit code of ``plan --strict``


def plan(args: argparse.Namespace) -> int:
    """Print which rank goes where, with how much memory. Reads no weights, starts nothing.

    Warns of what this machine could not hold; with --strict, the exit code says so too.
    """
    from cluster.memory import plan_problem, total_bytes
    from worker.checkpoint import declared_bytes

    found = _plan(words.read(args))
    print(render(found))
    stored = declared_bytes(found.folder)
    problem = plan_problem(found.config, found.model, stored, total_bytes())
    if problem is None:
        return 0
    print(f"\nwarning: {problem}")
    return NOT_FITTING if args.strict else 0


def check(args: argparse.Namespace) -> int:
    """Run every preflight check. Raises OperatorError with all problems, one a line."""
    from cluster import preflight
    from cluster.plan import resolve_dtype
    from cluster.serve import cpu

    config = resolve_dtype(words.read(args), cpu())
    warnings = preflight.check(config, _folder(config))
    found = _plan(config)
    found.ranks()
    from worker.models.weights import check_weights  # torch, which the preflight has found

    check_weights(found.folder, found.model)
    print("\n".join([*(f"warning: {line}" for line in warnings), "all checks passed"]))
    return 0


def render(plan: Plan) -> str:
    """One line for each rank, then the whole."""
    weights = plan.weight_bytes
    rows = [COLUMNS]
    total = 0
    for spec in plan.ranks():
        pool = spec.group.kv_tokens * plan.kv_bytes_per_token
        total += weights + pool
        rows.append(
            (
                str(spec.rank),
                plan.place,
                str(spec.group.threads),
                spec.dtype,
                _gib(weights),
                _gib(pool),
                str(spec.group.kv_tokens),
                str(spec.context_len),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    ranks = len(rows) - 1
    return "\n".join(
        [
            f"{plan.model.architecture}, {plan.kv_bytes_per_token} bytes of KV a token",
            "",
            *(line.rstrip() for line in lines),
            "",
            f"{ranks} ranks, {_gib(total)} of weights and KV in all",
        ]
    )


def _plan(config: ClusterConfig) -> Plan:
    from cluster.plan import Plan, resolve_dtype
    from cluster.serve import cpu
    from worker.architectures import read_spec

    folder = _folder(config)
    return Plan(resolve_dtype(config, cpu()), folder, read_spec(folder), cpu())


def _folder(config: ClusterConfig) -> Path:
    """Of a model that is there already: looking must not download."""
    from cluster import model_store

    folder = model_store.find(config.model.source)
    if folder is None:
        raise ModelError(
            f"{config.model.source} is not on this machine yet:"
            f" antiphon model fetch {config.model.source}"
        )
    return folder


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
