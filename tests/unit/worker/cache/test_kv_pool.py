"""The pool's tensors, what a token costs, and the regions that transfers copy."""

from __future__ import annotations

import ctypes

import pytest
import torch

from core.shared_memory import map_file
from tests.support import specs
from worker.cache.kv_pool import KVPool


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
    assert sum(size for _, size in source.regions()) == source.bytes_per_token
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


@pytest.mark.parametrize("spec", [specs.dense(layers=40), specs.latent()], ids=["mha", "mla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slots_are_copied_in_every_layer_and_nothing_else_is(spec, dtype):
    pool = KVPool(spec, 8, dtype)
    tensors = pool.latent + pool.k + pool.v
    for tensor in tensors:
        tensor.normal_()
    wanted = [tensor.clone() for tensor in tensors]
    for tensor in wanted:
        tensor[[6, 1]] = tensor[[3, 3]]
    pool.copy(torch.tensor([3, 3]), torch.tensor([6, 1]))
    assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))


def test_layers_of_a_token_lie_side_by_side():
    pool = KVPool(specs.dense(layers=3, kv_heads=2, head_dim=16), 10, torch.bfloat16)
    ((base, size),) = pool.regions()
    rows = [t[4].data_ptr() for pair in zip(pool.k, pool.v, strict=True) for t in pair]
    assert rows == [base + 4 * size + 64 * i for i in range(6)]


def test_as_many_layers_as_fit_a_page_of_memory():
    """SmolLM2-135M: 768 bytes a layer. One cache line more, see the next test."""
    pool = KVPool(specs.dense(layers=30, kv_heads=3, head_dim=64), 7, torch.bfloat16)
    assert [size for _, size in pool.regions()] == [5 * 768 + 64] * 6
    (start, length), bases = pool.span, [base for base, _ in pool.regions()]
    assert bases == [start + 7 * 3904 * block for block in range(6)]
    assert length == 7 * 6 * 3904
    uneven = KVPool(specs.dense(layers=7, kv_heads=3, head_dim=64), 7, torch.bfloat16)
    assert [size for _, size in uneven.regions()] == [3136, 2368]  # four layers and three


@pytest.mark.parametrize(("kv_heads", "lines"), [(3, 6), (7, 14), (8, 17), (9, 19), (64, 129)])
def test_wide_slots_are_an_odd_number_of_cache_lines_apart(kv_heads, lines):
    """Rows of one layer 2 ** n bytes apart would all fall into the same sets of the cache."""
    pool = KVPool(specs.dense(layers=1, kv_heads=kv_heads, head_dim=32), 3, torch.bfloat16)
    assert pool.bytes_per_token == 64 * lines
    pool.v[0][1] = 1.0
    assert not any(tensor[[0, 2]].any() for tensor in pool.k + pool.v)


def test_a_shared_pool_can_be_mapped_by_others():
    private = KVPool(specs.dense(), 10, torch.float32)
    assert private.file == -1
    pool = KVPool(specs.dense(), 10, torch.float32, shared=True)
    assert not any(tensor.any() for tensor in pool.k + pool.v)
    pool.k[0][3] = 1.5
    mapped, _ = map_file(pool.file)
    ((base, size),) = pool.regions()
    assert len(mapped) == 10 * size
    assert base % 64 == 0
    assert mapped[:] == ctypes.string_at(base, 10 * size)
    there = torch.frombuffer(mapped, dtype=torch.float32).view(10, -1)
    assert there[3].count_nonzero() == pool.k[0][3].numel()
    assert pool.k[0].stride() == private.k[0].stride()
