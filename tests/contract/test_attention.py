"""Every attention backend against attention written out token by token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import specs
from tests.support.steps import Row, make_step, scattered
from worker.attention.base import AttentionBackend, LatentUp
from worker.attention.registry import ATTENTION
from worker.cache.kv_pool import KVPool

SLOTS = 900
SCALE = 0.3

# (tokens computed before, tokens of this step) of each sequence
MIXES = {
    "one prompt": [(0, 5)],
    "one long prompt": [(0, 300)],
    "one decode": [(17, 1)],
    "first token": [(0, 1)],
    "decodes of equal length": [(30, 1), (30, 1), (30, 1)],
    "decodes of all lengths": [(1, 1), (200, 1), (70, 1), (3, 1), (127, 1), (128, 1)],
    "chunks with prefixes": [(7, 4), (150, 140), (64, 2)],
    "everything": [(0, 9), (12, 1), (40, 33), (0, 1), (250, 1), (5, 130)],
}


@pytest.fixture(params=ATTENTION.usable())
def backend(request) -> AttentionBackend:
    return ATTENTION.load(request.param)()


@dataclass
class World:
    """Random caches of several sequences, on scattered slots, and the step that comes next."""

    rows: list[tuple[Row, int]]

    @classmethod
    def make(cls, mix, seed=0, common=0):
        """``common``: so many of the first tokens lie on the same slots in all sequences."""
        slots = [slot for slot in scattered(SLOTS, seed) if slot]  # slot 0 is nobody's
        rows = []
        for before, n in mix:
            own = before + n - (common if rows else 0)
            mine = rows[0][0].slots[:common] if rows else []
            mine, slots = mine + slots[:own], slots[own:]
            rows.append((Row([0] * (before + n), mine, done=before), n))
        return cls(rows)

    def step(self):
        return make_step(self.rows)

    def queries(self):
        """(token of the step, slots it sees) of every query."""
        token = 0
        for row, n in self.rows:
            for position in range(row.done, row.done + n):
                yield token, row.slots[: position + 1]
                token += 1


def attend(q, k, v):
    """One query [heads, dim] over keys [n, heads, dim] and values, in fp64."""
    scores = torch.einsum("hd,nhd->hn", q.double(), k.double()) * SCALE
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v.double())


def check_mha(backend, mix, seed, dtype, kv_heads=2, common=0):
    torch.manual_seed(seed)
    spec = specs.dense(heads=6, kv_heads=kv_heads)
    pool = KVPool(spec, SLOTS, dtype)
    for tensor in pool.k + pool.v:
        tensor.normal_()
    world = World.make(mix, seed, common)
    step = world.step()
    total = len(step.token_ids)
    q = torch.randn(total, 6, 16).to(dtype)
    # views into a fused projection, as a model has them
    k, v = torch.randn(total, 2 * kv_heads, 16).to(dtype).split(kv_heads, dim=1)
    untouched = pool.k[0].clone(), pool.v[0].clone()
    out = backend.mha(backend.plan(step), 1, q, k, v, pool, SCALE)
    assert torch.equal(pool.k[1][step.write_slots], k)
    assert torch.equal(pool.v[1][step.write_slots], v)
    assert torch.equal(pool.k[0], untouched[0])
    assert torch.equal(pool.v[0], untouched[1])
    group = 6 // kv_heads
    for token, seen in world.queries():
        keys = pool.k[1][seen].repeat_interleave(group, dim=1)
        values = pool.v[1][seen].repeat_interleave(group, dim=1)
        close(out[token], attend(q[token], keys, values), dtype)


def check_mla(backend, mix, seed, dtype, common=0):
    torch.manual_seed(seed)
    spec = specs.latent()
    pool = KVPool(spec, SLOTS, dtype)
    for tensor in pool.latent:
        tensor.normal_()
    world = World.make(mix, seed, common)
    step = world.step()
    total = len(step.token_ids)
    q, latent = torch.randn(total, 4, 24).to(dtype), torch.randn(total, 32).to(dtype)
    weight = (torch.randn(4, 28, 24) / 5).to(dtype)
    up = LatentUp(weight[:, :16], weight[:, 16:])
    out = backend.mla(backend.plan(step), 1, q, latent, backend.pack(up), pool, SCALE)
    assert torch.equal(pool.latent[1][step.write_slots], latent)
    for token, seen in world.queries():
        cached = pool.latent[1][seen].double()
        c, rotary = cached[:, :24], cached[:, 24:]
        keys = torch.einsum("hor,nr->nho", up.key.double(), c)
        keys = torch.cat((keys, rotary.unsqueeze(1).expand(-1, 4, -1)), dim=-1)
        values = torch.einsum("hor,nr->nho", up.value.double(), c)
        close(out[token], attend(q[token], keys, values), dtype)


def close(ours, reference, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_mha(backend, mix, dtype):
    check_mha(backend, mix, seed=1, dtype=dtype)


@pytest.mark.parametrize("kv_heads", [1, 6])
def test_mha_with_one_and_with_all_kv_heads(backend, kv_heads):
    check_mha(backend, MIXES["everything"], seed=2, dtype=torch.float32, kv_heads=kv_heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_mla(backend, mix, dtype):
    check_mla(backend, mix, seed=3, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("check", [check_mha, check_mla])
def test_a_common_prefix(backend, check, dtype):
    mix = [(280, 1), (300, 1), (270, 3), (270, 30), (259, 1)]
    check(backend, mix, seed=4, dtype=dtype, common=259)


mixes = st.lists(
    st.tuples(st.integers(0, 100), st.one_of(st.just(1), st.integers(1, 40))),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", ATTENTION.usable())
@settings(max_examples=25, deadline=None)
@given(mix=mixes, seed=st.integers(0, 99))
def test_any_mix(name, mix, seed):
    backend = ATTENTION.load(name)()
    check_mha(backend, mix, seed, torch.float32)
    check_mla(backend, mix, seed, torch.float32)


def test_garbage_in_slots_of_others_is_never_seen(backend):
    """Padding may read foreign slots; even a NaN there must not reach a result."""
    spec = specs.dense(heads=6)
    pool = KVPool(spec, SLOTS, torch.float32)
    world = World.make(MIXES["decodes of all lengths"])
    own = sorted(slot for row, _ in world.rows for slot in row.slots)
    for tensor in (*pool.k, *pool.v):
        tensor.fill_(float("nan"))
        tensor[own] = 0.5
    step = world.step()
    q, k = torch.randn(len(step.token_ids), 6, 16), torch.randn(len(step.token_ids), 2, 16)
    out = backend.mha(backend.plan(step), 0, q, k, k, pool, SCALE)
    assert out.isfinite().all()
