"""Recorded steps: the same bits as without, whatever sequences a step has; or no recording."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support import tiny_models
from tests.support.steps import Row, advance
from worker.architectures import read_spec
from worker.cache.kv_pool import KVPool
from worker.kernels import ops
from worker.kernels.load import problem
from worker.models import stack as module
from worker.models.decoder import Decoder
from worker.models.weights import load_model

pytestmark = pytest.mark.skipif(problem() is not None, reason="no C++ compiler here")

SLOTS = 4000


def load(folder, dtype=torch.float32) -> tuple[Decoder, KVPool]:
    torch.set_num_threads(2)
    spec = read_spec(folder)
    model = load_model(folder, spec, dtype)
    assert isinstance(model, Decoder)
    return model, KVPool(spec, SLOTS, dtype)


@pytest.fixture(params=["llama-biases", "qwen3-biases"], scope="module")
def folder(request, tmp_path_factory):
    return tiny_models.make(request.param, tmp_path_factory.mktemp(request.param)).folder


def unrecorded(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_TOKENS", 0)


def history(model: Decoder, pool: KVPool, seed: int) -> list[torch.Tensor]:
    """Logits of many steps: rows that share a prefix come, decode and go."""
    draw, out = random.Random(seed), []
    slots = list(range(SLOTS))
    prefix = [draw.randrange(3, 128) for _ in range(390)]
    first = Row(prefix, [slots.pop() for _ in prefix])
    for _ in range(0, 390, 65):
        out += advance(model, pool, [(first, 65)])
    rows: list[Row] = []
    for _ in range(24):
        if len(rows) < 7 and draw.random() < 0.6:
            cached = draw.choice([0, 256, 300, 390])
            rows.append(Row(prefix[:cached], first.slots[:cached], cached))
        if len(rows) > 2 and draw.random() < 0.2:
            rows.pop(draw.randrange(len(rows)))
        parts = []
        for row in rows:
            new = draw.choice([1, 1, 1, 1, 5])
            row.ids += [draw.randrange(3, 128) for _ in range(new)]
            row.slots += [slots.pop() for _ in range(new)]
            parts.append((row, new))
        out += advance(model, pool, parts) if parts else []
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
def test_replayed_steps_give_the_same_bits(folder, dtype, seed, monkeypatch):
    recorded = history(*load(folder, dtype), seed)
    unrecorded(monkeypatch)
    for ours, plain in zip(recorded, history(*load(folder, dtype), seed), strict=True):
        assert torch.equal(ours, plain)


def test_each_size_is_recorded_once_and_replayed_after_that(folder, monkeypatch):
    model, pool = load(folder)
    calls = []
    rotate = ops.rotate_
    monkeypatch.setattr(ops, "rotate_", lambda x, by: calls.append(len(x)) or rotate(x, by))
    rows = [Row(list(range(3, 40)), range(100 * i, 100 * i + 40)) for i in range(3)]
    advance(model, pool, [(rows[0], 3)])
    assert calls == [3] * 3  # one a layer
    advance(model, pool, [(row, 1) for row in rows])  # as many tokens, of other sequences
    assert calls == [3] * 3
    advance(model, pool, [(rows[0], 4)])
    assert calls == [3] * 3 + [4] * 3


def test_another_pool_is_another_recording(folder):
    model, pool = load(folder)
    other = KVPool(model.spec, SLOTS, torch.float32)
    ids = list(range(3, 30))
    before = [advance(model, where, [(Row(ids, range(40)), 5)])[0] for where in (pool, other, pool)]
    assert torch.equal(before[0], before[1])
    assert torch.equal(before[0], before[2])
    assert torch.equal(pool.k[0], other.k[0])


def test_long_steps_are_not_recorded(folder, monkeypatch):
    monkeypatch.setattr(torch.classes.antiphon, "Recording", None)
    model, pool = load(folder)
    advance(model, pool, [(Row([5] * 100, range(100)), 65)])
    with pytest.raises(TypeError):
        advance(model, pool, [(Row([5] * 100, range(100)), 64)])


def test_what_a_replay_would_leave_out_is_never_recorded(folder, monkeypatch):
    """A plain torch operator between the kernels: the step still comes out right, every time."""

    def by_torch(x, rotations):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return x.copy_(torch.view_as_real(pairs * rotations).flatten(-2))

    monkeypatch.setattr(ops, "rotate_", by_torch)
    recorded = history(*load(folder), 1)
    unrecorded(monkeypatch)
    for ours, plain in zip(recorded, history(*load(folder), 1), strict=True):
        assert torch.equal(ours, plain)


def test_experts_are_not_recorded(monkeypatch):
    """Their groups are each step's own."""
    model, pool = load(tiny_models.TINY_MOE)
    rows = [Row(list(range(3, 40)), range(100 * i, 100 * i + 40)) for i in range(2)]
    ours = [advance(model, pool, [(row, 1) for row in rows]) for _ in range(4)]
    unrecorded(monkeypatch)
    model, pool = load(tiny_models.TINY_MOE)
    rows = [Row(list(range(3, 40)), range(100 * i, 100 * i + 40)) for i in range(2)]
    for step in ours:
        plain = advance(model, pool, [(row, 1) for row in rows])
        assert all(map(torch.equal, step, plain))


def recording(tokens: int = 2):
    """One layer's attention over 8 slots: x is q, k and v side by side, one head of 16 numbers."""
    x = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(0))
    pool = torch.zeros(2, 8, 1, 16)
    made = torch.classes.antiphon.Recording(x, torch.ones(tokens, 1, 8) + 0j, torch.arange(tokens))
    spans = torch.tensor([[0, tokens, 0, tokens]])
    made.begin()
    try:
        q, k, v = (part.view(tokens, 1, 16) for part in made.x().split(16, dim=1))
        torch.ops.antiphon.scatter_rows(pool[0], made.write_slots(), k)
        torch.ops.antiphon.scatter_rows(pool[1], made.write_slots(), v)
        out = torch.ops.antiphon.attention(
            q, pool[0], pool[1], spans, torch.arange(tokens), 0.25, None, None
        )
        torch.ops.antiphon.add_(made.x()[:, :16], out.view(tokens, 16))
    finally:
        made.end()
    return made, pool


def test_a_replay_checks_what_it_is_given():
    made, _ = recording()
    x, turns, slots = torch.zeros(2, 48), torch.ones(2, 1, 8) + 0j, torch.tensor([4, 5])
    spans = torch.tensor([[0, 1, 0, 3], [1, 2, 3, 5]])
    keys = torch.tensor([1, 2, 4, 6, 5])
    made.run(x, turns, slots, spans, keys, None, None)
    for wrong in (
        (torch.zeros(3, 48), turns, slots, spans, keys),
        (x, turns, torch.tensor([4, 8]), spans, keys),  # beyond the pool
        (x, turns, slots, spans, torch.tensor([1, 2, 4, 6, -1])),
        (x, turns, slots, torch.tensor([[0, 1, 0, 3], [1, 2, 3, 6]]), keys),
        (x, turns, slots, torch.tensor([[0, 3, 0, 5]]), keys),
    ):
        with pytest.raises(RuntimeError):
            made.run(*wrong, None, None)


def test_a_replay_reads_what_it_is_given_and_writes_where_it_is_told():
    made, pool = recording()
    pool.zero_()
    x = torch.randn(2, 48, generator=torch.Generator().manual_seed(5))
    before = x.clone()
    out = made.run(
        x, torch.ones(2, 1, 8) + 0j, torch.tensor([6, 3]), torch.tensor([[0, 2, 0, 2]]),
        torch.tensor([6, 3]), None, None,
    )  # fmt: skip
    assert torch.equal(x, before), "the caller's own is not touched"
    assert torch.equal(pool[0, [6, 3], 0], x[:, 16:32])
    assert torch.equal(pool[1, [6, 3], 0], x[:, 32:])
    assert not pool[:, [0, 1, 2, 4, 5, 7]].any()
    assert torch.allclose(out[0, :16], x[0, :16] + x[0, 32:])  # the first sees itself alone
    assert torch.equal(out[:, 16:], x[:, 16:])


def test_what_cannot_be_recorded_says_so():
    made = torch.classes.antiphon.Recording(
        torch.zeros(1, 4), torch.ones(1, 1, 2) + 0j, torch.arange(1)
    )
    made.begin()
    try:
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            torch.ops.antiphon.argmax(torch.zeros(1, 4))
        with pytest.raises(RuntimeError, match="has begun one"):
            made.begin()
    finally:
        made.end()
    torch.ops.antiphon.argmax(torch.zeros(1, 4))
