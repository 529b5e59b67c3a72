"""``antiphon model``: fetch, list, show and make models. Imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ModelError

if TYPE_CHECKING:
    from cluster.model_catalog import Facts, Listed
    from worker.model_spec import ModelSpec

NAME_HELP = "a folder, a hub name owner/model, or a built-in name"
COLUMNS = ("NAME", "ARCHITECTURE", "PARAMETERS", "SIZE", "CONTEXT", "STATE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the sub-commands."""
    commands: Any = parser.add_subparsers(required=True, metavar="WHAT")  # opaque: argparse's

    fetch = commands.add_parser("fetch", help="download and convert a model; prints its folder")
    fetch.add_argument("name", nargs="?", metavar="NAME", help=f"{NAME_HELP} (default: built in)")
    fetch.set_defaults(run=_fetch)

    listing = commands.add_parser("list", help="what is built in and what is in the caches")
    listing.set_defaults(run=_list)

    show = commands.add_parser("show", help="the facts of a model that is on this machine")
    show.add_argument("name", metavar="NAME", help=NAME_HELP)
    show.set_defaults(run=_show)

    tiny = commands.add_parser("make-tiny", help="write a small model with random weights")
    tiny.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    tiny.add_argument(
        "--architecture",
        metavar="WORD",
        help="llama, mistral, qwen2, qwen3, qwen3_moe, deepseek_v2 or deepseek_v3 (the default)",
    )
    tiny.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights")
    tiny.set_defaults(run=_make_tiny)


def _fetch(args: argparse.Namespace) -> int:
    from cluster import model_store

    print(model_store.resolve(args.name or model_store.DEFAULT, _note))
    return 0


def _note(line: str) -> None:
    """Progress goes to stderr: stdout is the folder alone, for scripts."""
    print(line, file=sys.stderr, flush=True)


def _list(_: argparse.Namespace) -> int:
    from cluster.model_catalog import catalogue

    print(table([COLUMNS, *map(row, catalogue())]))
    return 0


def _show(args: argparse.Namespace) -> int:
    from cluster import model_catalog, model_store

    folder = model_store.find(args.name)
    if folder is None:
        raise ModelError(
            f"{args.name} is not on this machine: run `antiphon model fetch {args.name}`"
        )
    print(describe(model_catalog.facts(folder)))
    return 0


def _make_tiny(args: argparse.Namespace) -> int:
    from cluster import tiny_model

    tiny_model.make(args.folder, args.architecture or tiny_model.DEFAULT, args.seed)
    print(f"antiphon serve --model {args.folder}")
    return 0


# --- what is printed ----------------------------------------------------------------------------


def row(listed: Listed) -> tuple[str, ...]:
    """One line of the list, cell by cell."""
    found = listed.facts
    if found is None:
        state = "cannot be served: see model show" if listed.problem else "not fetched"
        return (listed.source, "-", "-", "-", "-", state)
    return (
        listed.source,
        found.spec.architecture,
        count(found.parameters),
        size(sum(found.weight_bytes.values())),
        str(found.spec.context_len),
        "ready",
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in lines)


def describe(facts: Facts) -> str:
    """A line for each fact of a model."""
    spec, kinds = facts.spec, facts.weight_bytes
    moe = spec.moe
    lines = {
        "folder": str(facts.folder),
        "architecture": spec.architecture,
        "layers": f"{spec.layers}, hidden size {spec.hidden}",
        "attention": _attention(spec),
        "experts": "none"
        if moe is None
        else f"{moe.topk} of {moe.experts} a token and {moe.shared_experts} shared, "
        f"in {len(moe.layers)} of {spec.layers} layers",
        "vocabulary": f"{spec.vocab} tokens",
        "context": f"{spec.context_len} tokens",
        "parameters": count(facts.parameters),
        "weights": ", ".join(f"{size(n)} in {dtype}" for dtype, n in kinds.items()),
        "KV cache": f"{size(spec.kv_numbers_per_token * 2)} a token in bfloat16, "
        f"{size(spec.kv_numbers_per_token * 4)} in float32",
    }
    return table(list(lines.items()))


def _attention(spec: ModelSpec) -> str:
    if spec.mla is not None:
        return f"multi-head latent, {spec.heads} heads, {spec.mla.latent_dim} numbers cached"
    return f"grouped-query, {spec.heads} heads over {spec.kv_heads}, of {spec.head_dim} numbers"


def count(number: int) -> str:
    """1234567 -> 1.23 M."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)


def size(count_bytes: float) -> str:
    """Bytes in the largest unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if count_bytes < 1024:
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.1f} GiB"
