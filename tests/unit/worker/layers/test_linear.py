"""Fused, reordered and packed matrices compute what F.linear does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from worker.kernels.load import problem
from worker.layers.embedding import Embedding, LmHead
from worker.layers.linear import Linear, can_pack
from worker.layers.parameter import neighbour_rows

KERNELS = pytest.mark.skipif(problem() is not None, reason="no C++ compiler here")


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


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 130),
    half=st.integers(1, 300),
    outer=st.integers(1, 200),
    first=st.integers(0, 129),
    seed=st.integers(0, 99),
)
def test_a_row_has_the_same_bits_whatever_it_is_batched_with(
    dtype, bias, wide, rows, half, outer, first, seed
):
    torch.manual_seed(seed)
    linear = Linear(2 * half, {"a": outer}, dtype, bias=bias, wide=wide)
    disk = loaded(linear)
    linear.pack()
    x = torch.randn(rows, 2 * half).to(dtype)
    torch.set_num_threads(2)
    whole = linear(x)
    torch.set_num_threads(1)
    first %= rows
    assert torch.equal(linear(x[first:]), whole[first:])
    assert torch.equal(linear(x[first : first + 1]), whole[first : first + 1])
    assert whole.dtype == (torch.float32 if wide else dtype)
    exact = F.linear(x.double(), *(t.to(dtype).double() for t in disk.values()))
    tolerance = 1e-2 if whole.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(whole.double(), exact, rtol=tolerance, atol=tolerance)


@KERNELS
def test_what_is_packed():
    assert can_pack(torch.empty(4, 3))
    assert can_pack(torch.empty(4, 4, dtype=torch.bfloat16))
    assert not can_pack(torch.empty(4, 3, dtype=torch.bfloat16))
    assert not can_pack(torch.empty(4, 4, dtype=torch.float16))


@KERNELS
def test_a_row_may_lie_anywhere():
    """Rows of a wider matrix, at an odd place."""
    linear = Linear(64, {"a": 40}, torch.bfloat16)
    loaded(linear)
    linear.pack()
    wide = torch.randn(5, 99).bfloat16()
    assert torch.equal(linear(wide[:, 3:67]), linear(wide[:, 3:67].contiguous()))


@KERNELS
def test_what_does_not_fit_is_refused():
    packed = torch.ops.antiphon.pack_linear(torch.randn(40, 64))
    with pytest.raises(RuntimeError, match="packed weight"):
        torch.ops.antiphon.linear(torch.randn(2, 62), packed, 40, None, False)
    with pytest.raises(RuntimeError, match="bias"):
        torch.ops.antiphon.linear(torch.randn(2, 64), packed, 40, torch.randn(39), False)


def test_rows_are_reordered_while_loading():
    order = neighbour_rows(heads=2, plain=1, rotary=4)
    assert order.tolist() == [0, 1, 3, 2, 4, 5, 6, 8, 7, 9]
    linear = Linear(8, {"a": 10, "b": 2}, torch.float32, bias=True, rows={"a": order})
    disk = loaded(linear)
    x = torch.randn(3, 8)
    a, b = (F.linear(x, disk[f"{part}.weight"], disk[f"{part}.bias"]) for part in "ab")
    expected = torch.cat((a[:, order], b), 1)
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("packed", [pytest.param(True, marks=KERNELS), False])
@pytest.mark.parametrize("tied", [True, False])
def test_lm_head(tied, packed, monkeypatch):
    if not packed:
        monkeypatch.setattr("worker.layers.linear.suits", lambda weight: False)
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
    torch.testing.assert_close(logits, F.linear(x.float(), weight.float()))
    assert torch.equal(embedding(torch.tensor([3, 9])), embedding.weight[[3, 9]])
