"""The pool's tensors, what a token costs, and the regions that transfers copy."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.support import specs
from worker.cache.kv_pool import KVPool, bytes_per_token


def test_keys_and_values():
    pool = KVPool(specs.dense(layers=3, kv_heads=2, head_dim=16), 10, torch.bfloat16)
    assert [t.shape for t in pool.k + pool.v] == [(10, 2, 16)] * 6
    assert pool.latent == ()
    assert pool.bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert all(t.dtype == torch.bfloat16 and not t.any() for t in pool.k + pool.v)


def test_latents():
    pool = KVPool(specs.latent(layers=3), 10, torch.float32)
    assert [t.shape for t in pool.latent] == [(10, 32)] * 3
    assert pool.k == pool.v == ()
    assert pool.bytes_per_token == 3 * 32 * 4


@pytest.mark.parametrize("spec", [specs.dense(), specs.latent()], ids=["mha", "mla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copying_regions_copies_slots(spec, dtype):
    """What a transport does: raw bytes from one pool's slot to another pool's other slot."""
    source, target = KVPool(spec, 8, dtype), KVPool(spec, 5, dtype)
    for tensor in source.latent + source.k + source.v:
        tensor.normal_()
    pairs = list(zip(source.regions(), target.regions(), strict=True))
    assert sum(size for _, size in source.regions()) == bytes_per_token(spec, dtype)
    for (ours, size), (theirs, their_size) in pairs:
        assert size == their_size
        ctypes.memmove(theirs + 1 * size, ours + 6 * size, size)
    for ours, theirs in (
        (source.latent, target.latent),
        (source.k, target.k),
        (source.v, target.v),
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a[6], b[1])
            assert not b[[0, 2, 3, 4]].any()
