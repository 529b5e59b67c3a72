"""The torch backend's own decisions: padding, query blocks, and the two forms of MLA."""

from __future__ import annotations

import pytest
import torch

from tests.support import specs
from tests.support.steps import Row, make_step, scattered
from worker.attention import mla_form
from worker.attention.base import LatentUp
from worker.attention.torch_plan import make_plan
from worker.attention.torch_ref import TorchAttention
from worker.cache.kv_pool import KVPool


def mla(form, mix, monkeypatch=None):
    torch.manual_seed(0)
    spec = specs.latent()
    pool = KVPool(spec, 400, torch.float32)
    slots, parts = scattered(400), []
    for before, n in mix:
        parts.append((Row([0] * (before + n), slots[: before + n], done=before), n))
        slots = slots[before + n :]
    pool.latent[0].normal_()
    step = make_step(parts)
    total = len(step.token_ids)
    weight = torch.randn(4, 28, 24) / 5
    backend = TorchAttention(form)
    return backend.mla(
        backend.plan(step),
        0,
        torch.randn(total, 4, 24),
        torch.randn(total, 32),
        LatentUp(weight[:, :16], weight[:, 16:]),
        pool,
        0.2,
    )


@pytest.mark.parametrize("mix", [[(0, 2)], [(0, 150)], [(100, 40), (0, 30), (60, 1)]])
def test_both_forms_of_mla_agree(mix):
    torch.testing.assert_close(mla("absorbed", mix), mla("expanded", mix), rtol=0, atol=1e-5)


def test_expanding_head_by_head_changes_nothing(monkeypatch):
    whole = mla("expanded", [(30, 50)])
    monkeypatch.setattr(mla_form, "EXPANDED_NUMBERS", 1)
    torch.testing.assert_close(mla("expanded", [(30, 50)]), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("before", "n", "expands"),
    [(0, 512, True), (0, 4, True), (4000, 4, False), (4000, 512, True)],
)
def test_the_cheaper_form_is_chosen(before, n, expands):
    """DeepSeek-V3's sizes: few queries over a long prefix stay absorbed."""
    row = make_plan(make_step([(Row([0] * (before + n), range(before + n), done=before), n)]))
    up = LatentUp(torch.empty(128, 128, 512), torch.empty(128, 128, 512))
    assert TorchAttention()._expands(row.extends[0], up, latent=576) is expands


def test_decode_rows_are_batched_by_length():
    slots = scattered(2000)
    lens = [60, 65, 1000, 1, 900]
    rows = [(Row([0] * n, slots[:n], done=n - 1), 1) for n in lens]
    plan = make_plan(make_step(rows))
    assert [batch.rows.tolist() for batch in plan.decodes] == [[0, 1, 3], [2, 4]]
    assert not plan.extends
    padded = sum(batch.slots.numel() for batch in plan.decodes)
    assert padded == 3 * 65 + 2 * 1000


def test_equal_lengths_need_no_mask():
    rows = [(Row([0] * 9, range(9), done=8), 1), (Row([0] * 9, range(9, 18), done=8), 1)]
    assert make_plan(make_step(rows)).decodes[0].mask is None


def test_a_block_of_queries_skips_the_keys_after_it():
    [row] = make_plan(make_step([(Row([0] * 400, range(400), done=100), 300)])).extends
    assert [(b.start, b.stop, b.keys) for b in row.blocks] == [
        (0, 128, 228),
        (128, 256, 356),
        (256, 300, 400),
    ]
    assert row.blocks[1].mask[0].nonzero().max() == 228  # query 128 sits at position 228
