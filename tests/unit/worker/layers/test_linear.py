"""Fused, reordered and packed matrices compute what F.linear does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from worker.layers.embedding import Embedding, LmHead
from worker.layers.linear import Linear, can_pack
from worker.layers.parameter import neighbour_rows


def loaded(linear: Linear, prefix: str = "") -> dict[str, torch.Tensor]:
    """Fill a linear with random weights; returns them as they lie on disk."""
    disk = {}
    for name, slot in linear.slots(prefix):
        disk[name] = torch.randn(slot.shape) / 8
        slot.fill(disk[name])
    return disk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_parts(dtype, rows, bias):
    torch.manual_seed(0)
    linear = Linear(64, {"a": 24, "b": 8}, dtype, bias=bias)
    disk = loaded(linear, "layer.")
    x = torch.randn(rows, 64).to(dtype)
    dense = linear(x)
    linear.pack()
    kinds = ("weight", "bias") if bias else ("weight",)
    assert list(disk) == [f"layer.{part}.{kind}" for part in "ab" for kind in kinds]
    weight = torch.cat([disk["layer.a.weight"], disk["layer.b.weight"]]).to(dtype)
    added = torch.cat([disk["layer.a.bias"], disk["layer.b.bias"]]).to(dtype) if bias else None
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {}
    torch.testing.assert_close(linear(x), F.linear(x, weight, added), **tolerance)
    torch.testing.assert_close(linear(x), dense, **tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outer", [576, 40])
def test_a_row_has_the_same_result_whatever_it_is_batched_with(outer, bias):
    """The packed fp32 product of one row would differ in the last bits from 1536 inputs on."""
    linear = Linear(1536, {"a": outer}, torch.float32, bias=bias)
    loaded(linear)
    linear.pack()
    x = torch.randn(40, 1536)
    whole = linear(x)
    for rows in (1, 2, 3, 17):
        assert torch.equal(linear(x[:rows]), whole[:rows])


def test_fp32_is_packed_here_and_fp16_is_not():
    assert can_pack(torch.empty(4, 4)) is torch.backends.mkldnn.is_available()
    assert not can_pack(torch.empty(4, 4, dtype=torch.float16))


def test_rows_are_reordered_while_loading():
    order = neighbour_rows(heads=2, plain=1, rotary=4)
    assert order.tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]
    linear = Linear(8, {"a": 10, "b": 2}, torch.float32, bias=True, rows={"a": order})
    disk = loaded(linear)
    x = torch.randn(3, 8)
    a, b = (F.linear(x, disk[f"{part}.weight"], disk[f"{part}.bias"]) for part in "ab")
    expected = torch.cat((a[:, order], b), 1)
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_lm_head(tied):
    embedding = Embedding(10, 16, torch.bfloat16)
    [(name, slot)] = embedding.slots("embed.")
    slot.fill(torch.randn(slot.shape))
    head = LmHead(embedding, tied=tied)
    slots = dict(head.slots())
    for own in slots.values():
        own.fill(embedding.weight * 2)
    head.pack()
    x = torch.randn(4, 16).bfloat16()
    logits = head(x)
    assert name == "embed.weight"
    assert list(slots) == ([] if tied else ["lm_head.weight"])
    assert logits.dtype == torch.float32
    weight = embedding.weight if tied else embedding.weight * 2
    torch.testing.assert_close(logits, F.linear(x, weight).float(), rtol=2e-2, atol=2e-2)
    assert torch.equal(embedding(torch.tensor([3, 9])), embedding.weight[[3, 9]])
