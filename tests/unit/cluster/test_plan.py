"""Which ranks there are, and with how many threads and which numbers each one runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cluster.plan import Cpu, Plan, resolve_dtype
from core.config import load
from core.errors import ConfigError
from core.wire import RankId, Role
from tests.support.specs import dense

FOLDER = Path("/models/tiny")
PLAIN = Cpu(cores=8, bf16=False)
MODEL_CONTEXT = 4096


def specs(tree: dict, cpu: Cpu = PLAIN):
    return plan(tree, cpu).ranks()


def plan(tree: dict, cpu: Cpu = PLAIN, **model) -> Plan:
    spec = msgspec.structs.replace(dense(**model), context_len=MODEL_CONTEXT)
    return Plan(resolve_dtype(load(tree), cpu), FOLDER, spec, cpu)


def test_one_spec_per_rank_in_the_order_of_a_request():
    found = specs({"decode": {"replicas": 2}, "prefill": {}})
    assert [(s.rank, s.role) for s in found] == [
        (RankId(group="prefill"), Role.PREFILL),
        (RankId(group="decode", replica=0), Role.DECODE),
        (RankId(group="decode", replica=1), Role.DECODE),
    ]
    assert {s.folder for s in found} == {str(FOLDER)}


@pytest.mark.parametrize(("cores", "threads"), [(8, 2), (9, 2), (3, 1), (1, 1)])
def test_cores_are_shared_out_and_nobody_gets_none(cores, threads):
    tree = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    found = specs(tree, Cpu(cores=cores, bf16=False))
    assert {s.group.threads for s in found} == {threads}


def test_every_rank_logs_as_the_cluster_is_told_to():
    found = specs({"prefill": {}, "decode": {}, "cluster": {"log_level": "info"}})
    assert {(s.log_level, s.log_format) for s in found} == {("info", "text")}
    found = specs({"unified": {}, "cluster": {"log_format": "json"}})
    assert {(s.log_level, s.log_format) for s in found} == {("warning", "json")}


def test_every_rank_knows_how_long_it_may_live_without_a_supervisor():
    found = specs({"unified": {}, "cluster": {"lease": {"orphan_s": 77}}})
    assert [s.lease.orphan_s for s in found] == [77.0]


def test_configured_threads_stay():
    found = specs({"prefill": {"threads": 5}, "decode": {}})
    assert [s.group.threads for s in found] == [5, 4]


@pytest.mark.parametrize(
    ("asked", "bf16", "dtype"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("bfloat16", False, "bfloat16"),
        ("float32", True, "float32"),
    ],
)
def test_auto_takes_bfloat16_where_the_processor_has_it(asked, bf16, dtype):
    (spec,) = specs({"unified": {}, "model": {"dtype": asked}}, Cpu(cores=1, bf16=bf16))
    assert spec.dtype == dtype


@pytest.mark.parametrize(
    ("flags", "bf16"),
    [({"avx512_bf16"}, True), ({"amx_bf16"}, True), ({"bf16"}, True), ({"avx512f"}, False)],
)
def test_what_processor_flags_say(flags, bf16):
    assert Cpu.read(4, frozenset(flags)) == Cpu(cores=4, bf16=bf16)


def test_the_context_is_the_models_own_unless_a_shorter_one_is_asked_for():
    (own,) = specs({"unified": {}})
    (short,) = specs({"unified": {}, "model": {"context_len": 100}})
    assert (own.context_len, short.context_len) == (MODEL_CONTEXT, 100)


def test_more_context_than_the_model_has_names_the_key_and_the_fix():
    with pytest.raises(ConfigError, match=r"\$\.model\.context_len.*5000.*4096.*lower it"):
        specs({"unified": {}, "model": {"context_len": 5000}})


def test_the_name_that_clients_send():
    (by_source,) = specs({"unified": {}, "model": {"source": "owner/model"}})
    (by_name,) = specs({"unified": {}, "model": {"source": "owner/model", "served_name": "mine"}})
    assert (by_source.served_name, by_name.served_name) == ("owner/model", "mine")


def test_the_pool_is_sized_by_tokens_or_by_memory():
    each = plan({"unified": {"kv_memory_mib": 2}}).kv_bytes_per_token
    (by_memory,) = specs({"unified": {"kv_memory_mib": 2}})
    (by_tokens,) = specs({"unified": {"kv_memory_mib": 2, "kv_tokens": 77}})
    assert by_memory.group.kv_tokens == 2 * 2**20 // each
    assert by_tokens.group.kv_tokens == 77


def test_a_pool_of_so_much_memory_is_rounded_down_to_whole_pages():
    each = plan({"unified": {"kv_memory_mib": 2}}).kv_bytes_per_token
    tokens = 2 * 2**20 // each
    (paged,) = specs({"unified": {"kv_memory_mib": 2, "page_size": 1000}})
    assert paged.group.kv_tokens == tokens // 1000 * 1000 < tokens
    with pytest.raises(ConfigError, match=f"not even a page of {tokens + 1} tokens"):
        specs({"unified": {"kv_memory_mib": 2, "page_size": tokens + 1}})


def test_a_pool_that_holds_nothing_names_the_fix():
    with pytest.raises(ConfigError, match="kv_memory_mib=1 holds not even two tokens"):
        plan({"unified": {"kv_memory_mib": 1}}, layers=10**6).ranks()


def test_no_request_is_longer_than_the_smallest_pool():
    small = plan({"prefill": {"kv_tokens": 500}, "decode": {"kv_tokens": 300}})
    assert {s.context_len for s in small.ranks()} == {300}


def test_a_replica_that_is_not_there_yet_has_a_spec_too():
    grown = plan({"prefill": {}, "decode": {}}).rank(RankId(group="decode", replica=7))
    assert (grown.role, grown.group.threads) == (Role.DECODE, 4)
