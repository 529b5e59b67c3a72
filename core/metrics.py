"""Every metric the system emits, declared in one table; a Prometheus sink and a null sink.

Call sites name a ``Metric`` object, never a string, so a metric that is not in the table cannot be
emitted. All names get the prefix ``antiphon_``; seconds and bytes are plain, without multiples.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from core.wire import LoadReport, RankId, Role

PREFIX = "antiphon_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Kind(StrEnum):
    """What a metric's value means."""

    COUNTER = "counter"  # only rises; Prometheus shows it with the suffix _total
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One line of the table. Found by identity: a hash of all fields would cost each token 1 µs."""

    name: str  # without the prefix
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, in its unit


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, help=text, labels=labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name=name, kind=Kind.HISTOGRAM, help=text, buckets=buckets)


_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_RANK = ("rank", "role")

# --- the front door ---------------------------------------------------------------------------

REQUESTS = _counter("requests", "Requests by how they ended", "status")
ABORTED = _counter("aborted_requests", "Requests whose caller went away or ran out of time")
RUNNING = _gauge("requests_running", "Requests inside the front door")
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens, each prompt once")
CACHED_TOKENS = _counter("cached_tokens", "Prompt tokens found in a prefix cache")
GENERATION_TOKENS = _counter("generation_tokens", "Output tokens of all choices")
TTFT = _histogram(
    "time_to_first_token_seconds", "From arrival to the first token", (0.01, 0.025, *_SECONDS)
)
ITL = _histogram(
    "inter_token_latency_seconds",
    "Time between output tokens of one choice",
    (0.001, 0.0025, 0.005, 0.01, 0.025, *_SECONDS[:7]),
)
E2E = _histogram(
    "e2e_request_latency_seconds", "From arrival to the last token", (*_SECONDS, 120.0, 300.0)
)

REROUTES = _counter("reroutes", "Streams that lost a rank and were carried on elsewhere")

# --- the policy cache_aware --------------------------------------------------------------------

ROUTING_DECISIONS = _counter(
    "routing_decisions",
    "Prompts by what the chosen rank holds of them: cached: as much as any rank; balanced: less "
    "than another one, which would have cost more; cold: nobody holds anything",
    "reason",
)
PREDICTED_CACHED_TOKENS = _counter(
    "predicted_cached_tokens", "Prompt tokens the router expected in the chosen rank's cache"
)
CACHE_PREDICTION_ERROR_TOKENS = _counter(
    "cache_prediction_error_tokens",
    "Difference to what was found there; over: fewer were found, under: more",
    "direction",
)

# --- each rank, from its latest LoadReport ------------------------------------------------------

RANK_WAITING = _gauge("rank_waiting_requests", "Requests queued on a rank", *_RANK)
RANK_WAITING_TOKENS = _gauge("rank_waiting_tokens", "Prompt tokens not yet computed", *_RANK)
RANK_RUNNING = _gauge("rank_running_requests", "Requests a rank is generating for", *_RANK)
RANK_HANDOFFS = _gauge("rank_handoff_requests", "Requests sending or awaiting KV", *_RANK)
RANK_FREE_PAGES = _gauge("rank_free_pages", "KV pages nobody uses", *_RANK)
RANK_CACHED_PAGES = _gauge("rank_cached_pages", "KV pages only the prefix cache holds", *_RANK)
RANK_TOTAL_PAGES = _gauge("rank_total_pages", "KV pages of the pool", *_RANK)
RANK_STEPS = _gauge("rank_steps", "Engine steps since the rank started", *_RANK)
RANK_PROMPT_TOKENS = _gauge("rank_prompt_tokens", "Prompt tokens since start", *_RANK)
RANK_CACHED_TOKENS = _gauge("rank_cached_tokens", "Prompt tokens from the cache", *_RANK)
RANK_OUTPUT_TOKENS = _gauge("rank_output_tokens", "Output tokens since start", *_RANK)
RANK_RETRACTIONS = _gauge("rank_retractions", "Sequences put back for lack of pages", *_RANK)
RANK_KV_SENT = _gauge("rank_kv_sent_bytes", "KV bytes sent to other ranks since start", *_RANK)
RANK_KV_RECEIVED = _gauge("rank_kv_received_bytes", "KV bytes received since start", *_RANK)
RANK_BUSY = _gauge("rank_busy_seconds", "Time in engine steps since start", *_RANK)
RANK_STUCK = _gauge("rank_stuck_steps", "Steps longer than watchdog_s since start", *_RANK)
RANK_PAGE_REPAIRS = _gauge(
    "rank_page_repairs", "Accounts of KV pages that did not add up and were put right", *_RANK
)
RANK_OLDEST_WAIT = _gauge("rank_oldest_waiting_seconds", "Age of the longest wait now", *_RANK)
RANK_LAST_STEP = _gauge("rank_last_step_seconds", "Time of the latest engine step", *_RANK)

METRICS: tuple[Metric, ...] = (
    REQUESTS, ABORTED, RUNNING, PROMPT_TOKENS, CACHED_TOKENS, GENERATION_TOKENS, TTFT, ITL, E2E,
    REROUTES, ROUTING_DECISIONS, PREDICTED_CACHED_TOKENS, CACHE_PREDICTION_ERROR_TOKENS,
    RANK_WAITING, RANK_WAITING_TOKENS, RANK_RUNNING, RANK_HANDOFFS, RANK_FREE_PAGES,
    RANK_CACHED_PAGES, RANK_TOTAL_PAGES, RANK_STEPS, RANK_PROMPT_TOKENS, RANK_CACHED_TOKENS,
    RANK_OUTPUT_TOKENS, RANK_RETRACTIONS, RANK_KV_SENT, RANK_KV_RECEIVED,
    RANK_BUSY, RANK_STUCK, RANK_PAGE_REPAIRS, RANK_OLDEST_WAIT, RANK_LAST_STEP,
)  # fmt: skip


class MetricSink(Protocol):
    """Where numbers go. ``labels`` are values, in the order of ``Metric.labels``."""

    def count(self, metric: Metric, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None: ...

    def set(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None: ...

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None: ...

    def forget(self, metric: Metric, labels: tuple[str, ...]) -> None:
        """Stop showing one labelled series, e.g. of a rank that is gone."""
        ...


class NullSink:
    """Keeps nothing."""

    def count(self, metric: Metric, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        pass

    def set(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        pass

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        pass

    def forget(self, metric: Metric, labels: tuple[str, ...]) -> None:
        pass


class PrometheusSink:
    """Keeps every metric of the table in a registry of its own. Two sinks share nothing."""

    def __init__(self, metrics: tuple[Metric, ...] = METRICS) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[Metric, Counter] = {}
        self._gauges: dict[Metric, Gauge] = {}
        self._histograms: dict[Metric, Histogram] = {}
        for metric in metrics:
            self._declare(metric)

    def _declare(self, metric: Metric) -> None:
        name = PREFIX + metric.name
        match metric.kind:
            case Kind.COUNTER:
                self._counters[metric] = Counter(
                    name, metric.help, metric.labels, registry=self._registry
                )
            case Kind.GAUGE:
                self._gauges[metric] = Gauge(
                    name, metric.help, metric.labels, registry=self._registry
                )
            case Kind.HISTOGRAM:
                self._histograms[metric] = Histogram(
                    name,
                    metric.help,
                    metric.labels,
                    registry=self._registry,
                    buckets=metric.buckets,
                )

    def count(self, metric: Metric, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        counter = self._counters[metric]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def set(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        gauge = self._gauges[metric]
        (gauge.labels(*labels) if labels else gauge).set(value)

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        histogram = self._histograms[metric]
        (histogram.labels(*labels) if labels else histogram).observe(value)

    def forget(self, metric: Metric, labels: tuple[str, ...]) -> None:
        parents: dict[Metric, Counter | Gauge | Histogram] = {
            **self._counters, **self._gauges, **self._histograms,
        }  # fmt: skip
        parents[metric].remove_by_labels(dict(zip(metric.labels, labels, strict=True)))

    def add(self, collector: Collector) -> None:
        """Show also what ``collector`` brings at each scrape."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """The page Prometheus scrapes, of type ``CONTENT_TYPE``."""
        return generate_latest(self._registry)


def record_load(sink: MetricSink, rank: RankId, role: Role, report: LoadReport) -> None:
    """Set the gauges of one rank from what it last said of itself."""
    labels = (str(rank), role.value)
    for metric, value in _rank_values(report):
        sink.set(metric, value, labels)


def forget_rank(sink: MetricSink, rank: RankId, role: Role) -> None:
    """Stop showing a rank that left."""
    for metric, _ in _rank_values(LoadReport()):
        sink.forget(metric, (str(rank), role.value))


def _rank_values(report: LoadReport) -> tuple[tuple[Metric, float], ...]:
    return (
        (RANK_WAITING, report.waiting_requests),
        (RANK_WAITING_TOKENS, report.waiting_tokens),
        (RANK_RUNNING, report.running_requests),
        (RANK_HANDOFFS, report.handoff_requests),
        (RANK_FREE_PAGES, report.free_pages),
        (RANK_CACHED_PAGES, report.cached_pages),
        (RANK_TOTAL_PAGES, report.total_pages),
        (RANK_STEPS, report.steps),
        (RANK_PROMPT_TOKENS, report.prompt_tokens),
        (RANK_CACHED_TOKENS, report.cached_tokens),
        (RANK_OUTPUT_TOKENS, report.output_tokens),
        (RANK_RETRACTIONS, report.retractions),
        (RANK_KV_SENT, report.kv_bytes_sent),
        (RANK_KV_RECEIVED, report.kv_bytes_received),
        (RANK_BUSY, report.busy_s),
        (RANK_STUCK, report.stuck_steps),
        (RANK_PAGE_REPAIRS, report.page_repairs),
        (RANK_OLDEST_WAIT, report.oldest_waiting_s),
        (RANK_LAST_STEP, report.last_step_s),
    )
