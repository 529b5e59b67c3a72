"""A picture of a run: latencies as distributions, throughput over time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.outcome import Outcome
from bench.report import Report
from core.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 100


def require(path: Path) -> None:
    """Raise an OperatorError where a plot cannot be drawn there; called before the run."""
    if find_spec("matplotlib") is None:
        raise PreflightError(
            "--plot needs matplotlib: pip install 'antiphon[bench]', or leave --plot out"
        )
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: must end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def draw(report: Report, outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the picture; the ending of the name decides the format."""
    from matplotlib.figure import Figure

    ok = [outcome for outcome in outcomes if outcome.ok]
    figure = Figure(figsize=(13, 4), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    targets = report.config.targets
    _distribution(first, "TTFT", [o.ttft_s for o in ok], targets.ttft_ms)
    _distribution(second, "ITL", [gap for o in ok for gap in o.itl_s], targets.itl_ms)
    _throughput(third, ok)
    interrupted = f", interrupted (of {report.planned} planned)" if report.interrupted else ""
    figure.suptitle(
        f"{report.config.label or report.model}: {report.config.workload}, "
        f"{report.result.ok} of {report.result.requests} requests, "
        f"{report.result.output_tokens_per_s:.0f} output tokens/s{interrupted}"
    )
    figure.savefig(path, dpi=120)


def _distribution(axes: Axes, name: str, seconds: Sequence[float], target_ms: float | None) -> None:
    """The share of values up to each value."""
    values = 1e3 * np.sort(np.asarray(seconds, dtype=float))
    axes.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post")
    if target_ms is not None:
        axes.axvline(target_ms, color="tab:red", linestyle="--", label="target")
        axes.legend()
    if len(values) and values[0] > 0 and values[-1] > 20 * values[0]:
        axes.set_xscale("log")
    axes.set(title=name, xlabel="ms", ylabel="share of values", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _throughput(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Output tokens a second, and requests in flight."""
    times, tokens, running = series(outcomes)
    axes.step(times, tokens, where="post", color="tab:blue")
    axes.set(title="over time", xlabel="s", ylabel="output tokens/s")
    axes.yaxis.label.set_color("tab:blue")
    axes.grid(alpha=0.3)
    twin: Any = axes.twinx()  # opaque: its type depends on the version
    twin.step(times, running, where="post", color="tab:orange", alpha=0.7)
    twin.set_ylabel("requests in flight", color="tab:orange")


def series(outcomes: Sequence[Outcome]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start of each bin (s), output tokens a second in it, requests in flight at its start.

    The tokens of a request are spread evenly over its chunks: usage tells their sum only.
    """
    if not outcomes:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    start_s = min(o.start_s for o in outcomes)
    length_s = max(o.end_s for o in outcomes) - start_s
    edges = np.linspace(0.0, max(length_s, 1e-6), _BINS + 1)
    at_s = np.concatenate([np.asarray(o.chunk_s, dtype=float) for o in outcomes]) - start_s
    weights = np.concatenate(
        [np.full(len(o.chunk_s), o.output_tokens / max(1, len(o.chunk_s))) for o in outcomes]
    )
    tokens, _ = np.histogram(at_s, edges, weights=weights)
    starts = np.sort([o.start_s - start_s for o in outcomes])
    ends = np.sort([o.end_s - start_s for o in outcomes])
    left = edges[:-1]
    running = np.searchsorted(starts, left, "right") - np.searchsorted(ends, left, "right")
    return left, tokens / (edges[1] - edges[0]), running
