"""``antiphon bench``: its arguments. The load generator itself is imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from antiphon.remote import add_access, key_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments; each default is that of bench.config.BenchConfig."""
    parser.set_defaults(run=run)
    _where(parser.add_argument_group("where"))
    _what(parser.add_argument_group("what"))
    _when(parser.add_argument_group("when"))
    _results(parser.add_argument_group("results"))


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code is 1 when every request failed, 130 after Ctrl-C."""
    from bench.client import Access
    from bench.command import Files, execute
    from bench.config import BenchConfig, Targets

    given = {name: value for name, value in vars(args).items() if value is not None}
    config = {name: given[name] for name in BenchConfig.__struct_fields__ if name in given}
    targets = {name: given[name] for name in Targets.__struct_fields__ if name in given}
    if "id_range" in config:
        config["id_range"] = tuple(config["id_range"])
    access = Access(key_of(args), args.ca)
    files = Files(args.json, args.requests_json, args.plot)
    return execute(BenchConfig(**config, targets=Targets(**targets)), files, access)


def _where(group: Any) -> None:  # opaque: argparse's group has no public name
    group.add_argument("--url", help="an OpenAI endpoint (default: http://127.0.0.1:8000)")
    group.add_argument("--model", help="default: the first of /v1/models")
    add_access(group)
    group.add_argument("--endpoint", choices=("completions", "chat"), help="default: completions")
    group.add_argument(
        "--prompt-format",
        choices=("text", "ids"),
        help="words, about one token each, or token ids, of exact length (default: text)",
    )
    group.add_argument(
        "--id-range", type=int, nargs=2, metavar=("LOW", "HIGH"), help="ids to draw: [LOW, HIGH)"
    )
    group.add_argument(
        "--timeout", type=float, dest="timeout_s", metavar="S", help="without a byte (default: 600)"
    )
    group.add_argument("--temperature", type=float, help="default: 0")
    group.add_argument(
        "--no-ignore-eos",
        action="store_false",
        default=None,
        dest="ignore_eos",
        help="let the model end its answer; for endpoints that do not know ignore_eos",
    )
    group.add_argument("--extra-body", type=_json, metavar="JSON", help="added to every request")


def _what(group: Any) -> None:  # opaque: argparse's group
    group.add_argument(
        "--workload",
        choices=("random", "shared-prefix", "multi-turn", "trace"),
        help="default: random",
    )
    group.add_argument("--trace", metavar="FILE", help=".jsonl of Mooncake or .csv of Azure")
    group.add_argument("--requests", type=int, metavar="N", help="default: 64, or the whole trace")
    group.add_argument(
        "--input-tokens", type=int, metavar="N", help="new in each request (default: 256)"
    )
    group.add_argument("--output-tokens", type=int, metavar="N", help="default: 64")
    group.add_argument(
        "--spread", type=float, metavar="X", help="lengths vary by +-X of themselves (default: 0)"
    )
    group.add_argument(
        "--prefix-tokens", type=int, metavar="N", help="length of a shared prefix (default: 1024)"
    )
    group.add_argument("--prefixes", type=int, metavar="N", help="shared prefixes (default: 8)")
    group.add_argument("--turns", type=int, metavar="N", help="of a conversation (default: 6)")
    group.add_argument(
        "--length-scale", type=float, metavar="X", help="multiply a trace's lengths by X"
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="same seed, same prompts: cached the second time"
    )


def _when(group: Any) -> None:  # opaque: argparse's group
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate", type=float, metavar="R", help="open loop: Poisson arrivals a second"
    )
    pace.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="closed loop: N in flight (default: 8; a trace keeps its own times)",
    )
    group.add_argument("--speed", type=float, metavar="X", help="of a trace's times (default: 1)")
    group.add_argument(
        "--warmup", type=int, metavar="N", help="requests before, not counted (default: 1)"
    )


def _results(group: Any) -> None:  # opaque: argparse's group
    target = "goodput: a request is good when it meets every target; "
    group.add_argument(
        "--target-ttft", type=float, dest="ttft_ms", metavar="MS", help=f"{target}time to 1st text"
    )
    group.add_argument(
        "--target-tpot", type=float, dest="tpot_ms", metavar="MS", help="mean time per token"
    )
    group.add_argument(
        "--target-itl", type=float, dest="itl_ms", metavar="MS", help="p99 of a request's gaps"
    )
    group.add_argument("--label", help="a name for this run, kept in the JSON and on the plot")
    group.add_argument("--json", type=Path, metavar="FILE", help="append the result as one line")
    group.add_argument(
        "--requests-json", type=Path, metavar="FILE", help="write a line for each request"
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")


def _json(text: str) -> dict[str, Any]:  # opaque: for the endpoint
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
