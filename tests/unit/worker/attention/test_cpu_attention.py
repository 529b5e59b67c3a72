"""The CPU backend's promises beyond the contract: real shapes, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.support import specs
from tests.support.steps import Row, make_step, scattered
from worker.attention.base import LatentUp
from worker.attention.cpu import CpuAttention
from worker.attention.registry import ATTENTION
from worker.attention.torch_ref import TorchAttention
from worker.cache.kv_pool import KVPool

pytestmark = pytest.mark.skipif("cpu" not in ATTENTION.usable(), reason="no C++ compiler here")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# (tokens computed before, tokens of this step)
MIX = [(0, 9), (299, 1), (0, 1), (255, 1), (256, 1), (40, 33), (5, 130)]
SHAPES = {"9/3": (9, 3, 64), "16/16": (16, 16, 128), "8/1": (8, 1, 96), "7/1": (7, 1, 16)}
LATENTS = {
    "64+16": (4, 64, 32, 16, 32),
    "512+64": (16, 512, 128, 64, 128),
    "24+8": (4, 24, 16, 8, 12),
}


class Sequences:
    """Random sequences in one pool, and their queries, to be run in any steps."""

    def __init__(self, mix, dtype, spec, query_dim, *, seed=0):
        torch.manual_seed(seed)
        self.mix = mix
        self.spec = spec
        total = sum(before + n for before, n in mix)
        self.pool = KVPool(spec, total + 5, dtype)
        for tensor in self.pool.k + self.pool.v + self.pool.latent:
            tensor.normal_()
        slots = scattered(total + 5, seed)
        self.rows = []
        for before, n in mix:
            mine, slots = slots[: before + n], slots[before + n :]
            self.rows.append(Row([0] * (before + n), mine, done=before))
        self.q = [torch.randn(n, spec.heads, query_dim).to(dtype) for _, n in mix]

    def written(self, tensors, i, start, stop):
        """What a pool holds for tokens of sequence i: a step writes the same again."""
        return tensors[0][self.rows[i].slots[start:stop]]


class Dense(Sequences):
    def __init__(self, mix, dtype, shape, seed=0):
        heads, kv_heads, dim = shape
        spec = specs.dense(layers=1, heads=heads, kv_heads=kv_heads, head_dim=dim)
        super().__init__(mix, dtype, spec, dim, seed=seed)

    def run(self, backend, parts):
        """``parts``: (sequence, first query, end of queries), one step. The queries' outputs."""
        step_rows, q, k, v = [], [], [], []
        for i, first, stop in parts:
            done = self.mix[i][0] + first
            step_rows.append((Row(self.rows[i].ids, self.rows[i].slots, done=done), stop - first))
            q.append(self.q[i][first:stop])
            k.append(self.written(self.pool.k, i, done, done + stop - first))
            v.append(self.written(self.pool.v, i, done, done + stop - first))
        step, scale = make_step(step_rows), self.spec.head_dim**-0.5
        return backend.mha(
            backend.plan(step), 0, torch.cat(q), torch.cat(k), torch.cat(v), self.pool, scale
        )


class Latent(Sequences):
    def __init__(self, mix, dtype, shape, seed=0):
        heads, rank, nope, rope, v_dim = shape
        spec = specs.latent_of(heads, rank, nope, rope, v_dim)
        super().__init__(mix, dtype, spec, nope + rope, seed=seed)
        weight = (torch.randn(heads, nope + v_dim, rank) / rank**0.5).to(dtype)
        self.up = LatentUp(weight[:, :nope], weight[:, nope:])

    def run(self, backend, parts):
        step_rows, q, latent = [], [], []
        for i, first, stop in parts:
            done = self.mix[i][0] + first
            step_rows.append((Row(self.rows[i].ids, self.rows[i].slots, done=done), stop - first))
            q.append(self.q[i][first:stop])
            latent.append(self.written(self.pool.latent, i, done, done + stop - first))
        step, scale = make_step(step_rows), self.q[0].shape[-1] ** -0.5
        plan = backend.plan(step)
        return backend.mla(
            plan, 0, torch.cat(q), torch.cat(latent), backend.pack(self.up), self.pool, scale
        )


def whole(mix):
    return [(i, 0, n) for i, (_, n) in enumerate(mix)]


def close(ours, reference, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_real_head_shapes(shape, dtype):
    world = Dense(MIX, dtype, shape)
    close(world.run(CpuAttention(), whole(MIX)), world.run(TorchAttention(), whole(MIX)), dtype)


@DTYPES
@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
@pytest.mark.parametrize("shape", LATENTS.values(), ids=LATENTS)
def test_real_latent_shapes(shape, form, dtype):
    world = Latent(MIX, dtype, shape)
    ours, reference = CpuAttention(form), TorchAttention(form)
    close(world.run(ours, whole(MIX)), world.run(reference, whole(MIX)), dtype)


def test_expanding_head_by_head_changes_nothing(monkeypatch):
    world, backend = Latent(MIX, torch.float32, LATENTS["64+16"]), CpuAttention("expanded")
    expected = world.run(backend, whole(MIX))
    monkeypatch.setattr("worker.attention.mla_form.EXPANDED_NUMBERS", 1)
    assert torch.equal(world.run(backend, whole(MIX)), expected)


@DTYPES
def test_a_long_context(dtype):
    mix = [(4999, 1), (3000, 40)]
    world = Dense(mix, dtype, (9, 3, 64))
    close(world.run(CpuAttention(), whole(mix)), world.run(TorchAttention(), whole(mix)), dtype)


WORLDS = {
    "mha": lambda mix, dtype, seed: Dense(mix, dtype, (9, 3, 64), seed),
    "mla": lambda mix, dtype, seed: Latent(mix, dtype, (4, 64, 32, 16, 32), seed),
}


@DTYPES
@pytest.mark.parametrize("kind", WORLDS)
@settings(max_examples=8, deadline=None)
@given(
    mix=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 30)), min_size=2, max_size=5),
    seed=st.integers(0, 99),
)
def test_a_token_has_the_same_bits_alone_in_a_batch_and_in_any_chunk(kind, dtype, mix, seed):
    world, backend = WORLDS[kind](mix, dtype, seed), CpuAttention("absorbed")
    together = world.run(backend, whole(mix)).split([n for _, n in mix])
    for i, (_, n) in enumerate(mix):
        assert torch.equal(world.run(backend, [(i, 0, n)]), together[i])
        assert torch.equal(world.run(backend, [(i, n - 1, n)])[0], together[i][-1])
        cut = n // 2
        if cut:
            halves = world.run(backend, [(i, 0, cut)]), world.run(backend, [(i, cut, n)])
            assert torch.equal(torch.cat(halves), together[i])


@DTYPES
@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize(
    "mix", [[(4000, 1)], [(700, 1), (3000, 1)], [(300, 200)], MIX], ids=["1", "2", "chunk", "mix"]
)
def test_the_number_of_threads_changes_no_bit(kind, dtype, mix):
    world, backend = WORLDS[kind](mix, dtype, 0), CpuAttention()
    alone = world.run(backend, whole(mix))
    torch.set_num_threads(2)
    try:
        assert torch.equal(world.run(backend, whole(mix)), alone)
    finally:
        torch.set_num_threads(1)


def test_a_nan_in_a_query_stays_visible():
    """A broken activation must not come out as a plausible number."""
    world = Dense([(100, 1)], torch.float32, (6, 2, 16))
    world.q[0][0, 3] = float("nan")
    out = world.run(CpuAttention(), [(0, 0, 1)])
    assert out[0, 3].isnan().all()
    assert out[0, :3].isfinite().all()
