"""What ranks have counted of their handoffs, on the page that Prometheus scrapes.

The ranks count, the router shows: each scrape renders the latest HandoffReport of every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric as Family,
)
from prometheus_client.registry import Collector

from core.handoffs import BOUNDS_S, HandoffReport
from core.metrics import PREFIX, Kind, Metric
from core.wire import RankId, Role

_RANK = ("rank", "role")


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=text, labels=(*_RANK, *labels))


PLACED = _counter(
    "handoff_prompts",
    "Prompts by where their missing tokens were computed: local: by the decode rank; remote_long, "
    "remote_off, remote_first: by the prefill rank, because they were many, or local_prefill is "
    "off, or the pair had handed nothing over yet",
    "reason",
)
FAILED = _counter("handoff_failures", "Rooms (of write_failed: writes) that failed", "cause")
PROMPT = _counter("handoff_prompt_tokens", "Tokens of the prompts that were handed over")
DELTA = _counter(
    "handoff_delta_tokens", "Of those, what the decode rank did not hold: what crosses"
)
MOVED = _counter("handoff_bytes", "KV bytes that crossed")
WRITING = _counter("handoff_write_seconds", "Time in KV writes, all lanes together")
CHECKED = _counter("handoff_checked_rooms", "Rooms whose checksums were sent, or compared")
FENCES = _counter("handoff_fences", "Transport engines replaced, after a lost peer or failed write")
RETRIES = _counter("handoff_retries", "Rooms announced again after a fence")
HELD = Metric(
    name="handoff_held_pages", kind=Kind.GAUGE, help="KV pages that open rooms hold", labels=_RANK
)
PHASES = Metric(
    name="handoff_phase_seconds",
    kind=Kind.HISTOGRAM,
    help="Decode: reserve: from arrival to pages; ready: from announcement to all KV; check: "
    "comparing checksums. Prefill: claim: from arrival to an announcement; send: from the first "
    "write that could begin to the end of the last",
    labels=(*_RANK, "phase"),
    buckets=BOUNDS_S,
)

HANDOFF_METRICS = (
    PLACED, FAILED, PROMPT, DELTA, MOVED, WRITING, CHECKED, FENCES, RETRIES, HELD, PHASES,
)  # fmt: skip

Reports = Mapping[tuple[RankId, Role], HandoffReport]


class HandoffCollector(Collector):
    """Shows the reports it was last given. One for each page."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], HandoffReport] = {}

    def show(self, reports: Reports) -> None:
        """These and no others."""
        self._reports = {(str(rank), role.value): r for (rank, role), r in reports.items()}

    def collect(self) -> Iterable[Family]:
        """What prometheus_client asks for at each scrape."""
        values = (
            (PROMPT, "prompt_tokens"),
            (DELTA, "delta_tokens"),
            (MOVED, "moved_bytes"),
            (WRITING, "write_s"),
            (CHECKED, "checked"),
            (FENCES, "fences"),
            (RETRIES, "retries"),
            (HELD, "held_pages"),
        )
        for metric, value in values:
            family = _family(metric)
            for labels, report in self._reports.items():
                family.add_metric(labels, getattr(report, value))
            yield family
        yield self._by_word(PLACED, {key: r.placed for key, r in self._reports.items()})
        yield self._by_word(FAILED, {key: r.failed for key, r in self._reports.items()})
        yield self._phases()

    def _by_word(self, metric: Metric, counts: Mapping[tuple[str, str], dict[str, int]]) -> Family:
        family = _family(metric)
        for labels, words in counts.items():
            for word, count in words.items():
                family.add_metric((*labels, word), count)
        return family

    def _phases(self) -> Family:
        family = HistogramMetricFamily(PREFIX + PHASES.name, PHASES.help, labels=PHASES.labels)
        bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        for labels, report in self._reports.items():
            for phase, times in report.phases.items():
                buckets = list(zip(bounds, accumulate(times.counts), strict=True))
                family.add_metric((*labels, phase), buckets, times.total_s)
        return family


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return kind(PREFIX + metric.name, metric.help, labels=metric.labels)
