"""Reports of ranks, as Prometheus sees them."""

from __future__ import annotations

from core.handoff_metrics import HANDOFF_METRICS, HandoffCollector
from core.handoffs import BOUNDS_S, HandoffCount
from core.metrics import METRICS, PREFIX, PrometheusSink
from core.wire import RankId, Role

RANK = 'rank="decode/0/0",role="decode"'


def page(collector):
    sink = PrometheusSink()
    sink.add(collector)
    return sink.render().decode().splitlines()


def shown(count):
    collector = HandoffCollector()
    collector.show({(RankId(group="decode"), Role.DECODE): count.report(held_pages=12)})
    return page(collector)


def test_counters_words_and_phases_of_a_rank():
    count = HandoffCount(prompt_tokens=1000, delta_tokens=40, moved_bytes=4096)
    count.placed["local"] += 3
    count.failed["peer_lost"] += 1
    for seconds in (0.0005, 0.003, 0.004, 99.0):
        count.took("ready", seconds)
    lines = shown(count)
    for name, labels, value in (
        ("prompt_tokens_total", "", 1000.0),
        ("delta_tokens_total", "", 40.0),
        ("bytes_total", "", 4096.0),
        ("held_pages", "", 12.0),
        ("prompts_total", 'reason="local",', 3.0),
        ("failures_total", 'cause="peer_lost",', 1.0),
        ("phase_seconds_count", 'phase="ready",', 4.0),
    ):
        told = ",".join(sorted([*filter(None, labels.split(",")), *RANK.split(",")]))
        assert f"{PREFIX}handoff_{name}{{{told}}} {value}" in lines
    start = f'{PREFIX}handoff_phase_seconds_bucket{{le="0.005",'
    assert [line.split()[-1] for line in lines if line.startswith(start)] == ["3.0"]


def test_every_metric_is_shown_and_none_has_the_name_of_another():
    count = HandoffCount()
    count.placed["local"] = count.failed["aborted"] = 1
    count.took("send", 1.0)
    text = "\n".join(shown(count))
    assert all(f"# HELP {PREFIX}{metric.name}" in text for metric in HANDOFF_METRICS)
    names = [metric.name for metric in (*METRICS, *HANDOFF_METRICS)]
    assert len(set(names)) == len(names)


def test_a_rank_that_left_is_not_shown():
    collector = HandoffCollector()
    collector.show({(RankId(group="decode"), Role.DECODE): HandoffCount().report(0)})
    collector.show({})
    assert not any("decode/0/0" in line for line in page(collector))


def test_a_time_is_counted_in_one_bucket():
    count = HandoffCount()
    for bound in BOUNDS_S:
        count.took("send", bound)
    count.took("send", -1.0)  # a clock that went back costs nothing
    times = count.report(0).phases["send"]
    assert times.counts == (2, *[1] * (len(BOUNDS_S) - 1), 0)
    assert times.count == len(BOUNDS_S) + 1
