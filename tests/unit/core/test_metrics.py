from __future__ import annotations

import pytest

from core import metrics
from core.metrics import METRICS, Kind, NullSink, PrometheusSink, forget_rank, record_load
from core.wire import LoadReport, RankId, Role

RANK = RankId(group="decode", replica=1)


def lines(sink: PrometheusSink) -> list[str]:
    return sink.render().decode().splitlines()


def test_every_metric_of_the_module_is_in_the_table():
    declared = [m for m in vars(metrics).values() if isinstance(m, metrics.Metric)]
    assert set(declared) == set(METRICS)
    assert len({m.name for m in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.help
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert sorted(metric.buckets) == list(metric.buckets)


def test_two_sinks_share_nothing():
    one, two = PrometheusSink(), PrometheusSink()
    one.count(metrics.REQUESTS, 2, ("ok",))
    one.set(metrics.RUNNING, 3)
    one.observe(metrics.TTFT, 0.02)
    assert 'antiphon_requests_total{status="ok"} 2.0' in lines(one)
    assert "antiphon_requests_running 3.0" in lines(one)
    assert 'antiphon_time_to_first_token_seconds_bucket{le="0.025"} 1.0' in lines(one)
    assert not any("ok" in line for line in lines(two) if "requests_total{" in line)


def test_a_rank_is_shown_until_it_is_forgotten():
    sink = PrometheusSink()
    record_load(sink, RANK, Role.DECODE, LoadReport(free_pages=7, kv_bytes_received=9))
    assert 'antiphon_rank_free_pages{rank="decode/1/0",role="decode"} 7.0' in lines(sink)
    assert 'antiphon_rank_kv_received_bytes{rank="decode/1/0",role="decode"} 9.0' in lines(sink)
    forget_rank(sink, RANK, Role.DECODE)
    assert not any("decode/1/0" in line for line in lines(sink))
    forget_rank(sink, RANK, Role.DECODE)  # twice does no harm


def test_a_metric_outside_the_table_is_a_defect():
    with pytest.raises(KeyError):
        PrometheusSink(metrics=()).count(metrics.REQUESTS)


def test_the_null_sink_takes_everything():
    sink = NullSink()
    sink.count(metrics.REQUESTS, 1, ("ok",))
    sink.observe(metrics.TTFT, 1.0)
    record_load(sink, RANK, Role.DECODE, LoadReport())
    forget_rank(sink, RANK, Role.DECODE)
