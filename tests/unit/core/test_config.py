"""The configuration tree: what is refused, and that the message says where and what to do."""

from __future__ import annotations

import msgspec
import pytest

from core import config
from core.errors import ConfigError
from core.wire import Role

PAIR = {"prefill": {}, "decode": {}}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (PAIR | {"decoder": {}}, ["decoder"]),
        ({"prefill": {"rank": 2}, "decode": {}}, ["rank", "$.prefill"]),
        ({"prefill": {"replicas": "two"}, "decode": {}}, ["$.prefill.replicas", "int"]),
        ({"prefill": {"replicas": 0}, "decode": {}}, ["replicas must be at least 1", "$.prefill"]),
        ({"prefill": {"watchdog_s": -1}, "decode": {}}, ["watchdog_s must be 0", "$.prefill"]),
        (PAIR | {"cluster": {"log_format": "xml"}}, ["xml", "$.cluster.log_format"]),
        (PAIR | {"cluster": {"log_level": "loud"}}, ["loud", "$.cluster.log_level"]),
        (PAIR | {"router": {"port": 70000}}, ["between 0", "$.router"]),
        (PAIR | {"router": {"queue_limit": 0}}, ["queue_limit", "$.router"]),
        (
            {"unified": {"kv_tokens": 1000, "page_size": 16}},
            ["kv_tokens=1000 must be a multiple of page_size=16", "$.unified"],
        ),
        ({"unified": {"page_size": 0}}, ["page_size must be at least 1", "$.unified"]),
        (
            {"prefill": {"page_size": 16}, "decode": {}},
            ["page_size must be the same for prefill and decode"],
        ),
        (PAIR | {"disagg": {"protocol": "smoke"}}, ["smoke", "$.disagg.protocol"]),
        (PAIR | {"disagg": {"peer_timeout_s": 0}}, ["peer_timeout_s", "$.disagg"]),
        (PAIR | {"disagg": {"transport": "mooncake_inline"}}, ["peer_timeout_s", "to 8 or more"]),
        (PAIR | {"model": {"source": ""}}, ["model.source", "$.model"]),
        (PAIR | {"model": {"aliases": ["a", ""]}}, ["model.aliases", "$.model"]),
        (PAIR | {"cluster": {"runtime": "slurm"}}, ["slurm", "$.cluster.runtime"]),
        (PAIR | {"cluster": {"lease": {"renew_s": 0}}}, ["renew_s", "$.cluster.lease"]),
        (PAIR | {"cluster": {"lease": {"lease_s": 1.5}}}, ["two times renew_s"]),
        (PAIR | {"cluster": {"lease": {"orphan_s": 10}}}, ["orphan_s must be more than lease_s"]),
        (PAIR | {"cluster": {"lease": {"stuck_limit_s": 0}}}, ["positive, or off"]),
        (PAIR | {"cluster": {"lease": {"stuck_limit_s": "no"}}}, ["$.cluster.lease"]),
        ({"prefill": {}}, ["both `prefill` and `decode`"]),
        ({}, ["or `unified` alone"]),
        (PAIR | {"unified": {}}, ["not both"]),
        ([], ["object", "array"]),
    ],
)
def test_a_wrong_tree_is_refused_with_its_path(tree, words):
    with pytest.raises(ConfigError) as caught:
        config.load(tree)
    for word in words:
        assert word in str(caught.value)


def test_an_engine_in_the_rank_needs_patient_peers():
    inline = {"disagg": {"transport": "mooncake_inline", "peer_timeout_s": 8}}
    patient = PAIR | inline | {"router": {"rank_timeout_s": 8}}
    assert config.load(patient).disagg.transport == "mooncake_inline"
    config.load({"unified": {}, "disagg": {"transport": "mooncake_inline"}})


def test_groups_come_in_request_order():
    assert list(config.load({"decode": {}, "prefill": {}}).groups) == [Role.PREFILL, Role.DECODE]
    assert list(config.load({"unified": {}}).groups) == [Role.UNIFIED]


def test_a_tree_survives_its_own_plain_form():
    tree = config.load({"unified": {"replicas": 3}, "router": {"port": 0}})
    assert config.load(msgspec.to_builtins(tree)) == tree


def test_the_tree_is_frozen():
    tree = config.load(PAIR)
    with pytest.raises(AttributeError):
        tree.router.port = 1
