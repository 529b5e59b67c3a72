"""The command line. Imports what a command needs when it runs: ``--help`` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from antiphon import bench_command, model_command, plan_command, remote, words
from core.errors import OperatorError

OPERATOR_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. 2 means: mend what the line on stderr names."""
    args = _parse(argv)
    try:
        code: int = args.run(args)
    except OperatorError as error:
        print(f"antiphon: {error}", file=sys.stderr)
        return OPERATOR_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments, where words of ``serve`` may come before and after its options."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "words") or any(w.startswith("-") for w in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.words += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="antiphon", description="A serving cluster for large language models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start a cluster and serve it over HTTP")
    words.add_arguments(serve)
    serve.add_argument("-v", "--verbose", action="store_true", help="log what happens inside")
    serve.set_defaults(run=_serve)

    router = commands.add_parser("router", help="another router in front of a running cluster")
    words.add_arguments(router)
    router.add_argument("--join", required=True, metavar="URL", help="the cluster's own router")
    remote.add_access(router)
    router.add_argument("-v", "--verbose", action="store_true", help="log what happens inside")
    router.set_defaults(run=_router)

    check = commands.add_parser("check", help="check machine, model and settings; start nothing")
    words.add_arguments(check)
    check.set_defaults(run=plan_command.check)

    plan = commands.add_parser("plan", help="which rank goes where, with how much memory")
    words.add_arguments(plan)
    plan.add_argument(
        "--strict", action="store_true", help="exit code 1 where this machine has too little memory"
    )
    plan.set_defaults(run=plan_command.plan)

    status = commands.add_parser("status", help="show groups, ranks, load, cache and KV transfers")
    remote.add_arguments(status)
    status.add_argument("--json", action="store_true", help="the raw answer")
    status.set_defaults(run=_status)

    dump = commands.add_parser("dump", help="what the router and each rank are doing right now")
    remote.add_arguments(dump)
    dump.add_argument("--rank", help="only this one, e.g. decode/0/0")
    dump.add_argument("--json", action="store_true", help="the raw answer")
    dump.set_defaults(run=_dump)

    bench = commands.add_parser("bench", help="load an OpenAI endpoint and measure it")
    bench_command.add_arguments(bench)

    model = commands.add_parser("model", help="fetch, list, show and make models")
    model_command.add_arguments(model)

    _add_operations(commands)

    presets = commands.add_parser("presets", help="list the presets")
    presets.set_defaults(run=_presets)
    return parser


def _add_operations(commands: Any) -> None:  # opaque: argparse's subparsers
    scale = commands.add_parser("scale", help="change how many replicas groups have, while serving")
    scale.add_argument(
        "groups", nargs="+", metavar="group=replicas", help="e.g. prefill=2 decode=1"
    )
    remote.add_arguments(scale)
    scale.set_defaults(run=_scale)

    drain = commands.add_parser(
        "drain", help="take one rank out of service without losing requests"
    )
    drain.add_argument("rank", help="as `antiphon status` names it, e.g. decode/1/0")
    remote.add_arguments(drain)
    drain.set_defaults(run=_drain)


def _serve(args: argparse.Namespace) -> int:
    import asyncio

    from core import env, log

    env.set_default("GRPC_VERBOSITY", "ERROR")  # Ray forks beside our gRPC threads, harmlessly

    config = words.read(args)
    log.setup("router", config.cluster.log_level, style=config.cluster.log_format)

    from cluster.serve import serve

    try:
        asyncio.run(serve(config, _say))
    except asyncio.CancelledError:  # SIGTERM while it started
        return INTERRUPTED
    return 0


def _router(args: argparse.Namespace) -> int:
    import asyncio

    from core import log

    config = words.read(args)
    log.setup("router", config.cluster.log_level, style=config.cluster.log_format)

    from cluster.join import join

    asyncio.run(join(config, args.join, _say, key=remote.key_of(args), ca=args.ca))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _status(args: argparse.Namespace) -> int:
    from antiphon.status import fetch, render

    status = fetch(remote.named(args))
    if args.json:
        import json

        print(json.dumps(status, indent=2))
    else:
        print(render(status))
    return 0 if status["ready"] else 1


def _dump(args: argparse.Namespace) -> int:
    from antiphon.dump import fetch, render

    dump = fetch(remote.named(args), args.rank)
    if args.json:
        import json

        print(json.dumps(dump, indent=2))
    else:
        print(render(dump))
    return 0


def _scale(args: argparse.Namespace) -> int:
    from antiphon.operate import scale

    print(scale(remote.named(args), args.groups))
    return 0


def _drain(args: argparse.Namespace) -> int:
    from antiphon.operate import drain

    print(drain(remote.named(args), args.rank))
    return 0


def _presets(_: argparse.Namespace) -> int:
    from core import presets

    print("\n".join(presets.names()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
