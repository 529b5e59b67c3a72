"""What a linear does besides its product, as kernels and in plain torch: norm, gate, residual."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from worker.kernels.load import problem
from worker.layers.grouped import GroupedLinear
from worker.layers.linear import Linear
from worker.layers.mlp import GatedMlp
from worker.layers.norm import RMSNorm

pytestmark = pytest.mark.skipif(problem() is not None, reason="no C++ compiler here")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
shapes = {
    "rows": st.integers(1, 130),
    "half": st.integers(1, 200),
    "outer": st.integers(1, 150),
    "first": st.integers(0, 129),
    "seed": st.integers(0, 99),
}


def fill(thing) -> None:
    for _, slot in thing.slots(""):
        slot.view.copy_(torch.randn(slot.shape) / 8)


def norm_of(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, dtype)
    fill(norm)
    return norm


def close(ours, expected, dtype):
    near = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(ours.double(), expected.double(), rtol=near, atol=near)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@settings(max_examples=20, deadline=None)
@given(**shapes)
def test_normed_gated_and_added_in_any_company(dtype, bias, rows, half, outer, first, seed):
    torch.manual_seed(seed)
    norm = norm_of(2 * half, dtype)
    gated = Linear(2 * half, {"gate": outer, "up": outer}, dtype, bias=bias, gated=True)
    added = Linear(2 * half, {"a": outer}, dtype, bias=bias)
    x, onto = torch.randn(rows, 2 * half).to(dtype), torch.randn(rows, outer).to(dtype)
    fill(gated)
    fill(added)
    dense, dense_sum = gated(norm.later(x)), onto.clone()
    added.add_to(dense_sum, norm.later(x))
    gated.pack()
    added.pack()

    def ours(here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        total = onto[here].clone()
        added.add_to(total, norm.later(x[here]))
        return gated(norm.later(x[here])), total

    torch.set_num_threads(2)
    whole = ours(slice(None))
    torch.set_num_threads(1)
    close(whole[0], dense, dtype)
    close(whole[1], dense_sum, dtype)
    first %= rows
    for here in (slice(first, None), slice(first, first + 1)):
        for part, all_rows in zip(ours(here), whole, strict=True):
            assert torch.equal(part, all_rows[here])


@DTYPES
def test_normed_within_the_product_or_before_it_is_the_same_bits(dtype):
    torch.manual_seed(0)
    norm, linear = norm_of(576, dtype), Linear(576, {"a": 100}, dtype)
    fill(linear)
    linear.pack()
    for rows in (1, 16, 60, 300):  # packed by each thread for itself, and together
        x = torch.randn(rows, 700).to(dtype)[:, 50:626]
        assert torch.equal(linear(norm.later(x)), linear(norm(x)))


def test_the_gate_at_its_ends():
    values = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]])
    gated = Linear(5, {"gate": 5, "up": 5}, torch.float32, bias=True, gated=True)
    slots = dict(gated.slots(""))
    slots["gate.weight"].fill(torch.eye(5))
    slots["gate.bias"].fill(torch.zeros(5))
    slots["up.weight"].fill(torch.zeros(5, 5))
    slots["up.bias"].fill(torch.ones(5))
    gated.pack()
    torch.testing.assert_close(gated(values), F.silu(values), rtol=1e-6, atol=1e-30)


@DTYPES
@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=9),
    half=st.integers(1, 90),
    outer=st.integers(1, 90),
)
def test_gated_experts(dtype, counts, half, outer):
    torch.manual_seed(0)
    experts = GroupedLinear(len(counts), 2 * half, {"gate": outer, "up": outer}, dtype, gated=True)
    fill(experts)
    x = torch.randn(sum(counts), 2 * half).to(dtype)
    dense = experts(x, counts)
    experts.pack()
    assert dense.shape == (sum(counts), outer)
    close(experts(x, counts), dense, dtype)


@DTYPES
def test_a_mlp_adds_to_the_rows_that_it_reads(dtype):
    torch.manual_seed(0)
    norm, mlp = norm_of(64, dtype), GatedMlp(64, 96, dtype)
    fill(mlp)
    weights = {name: slot.view.double().clone() for name, slot in mlp.slots("")}
    mlp.pack()
    x = torch.randn(40, 64).to(dtype)
    rows = norm(x).double()
    inner = F.silu(rows @ weights["gate_proj.weight"].T) * (rows @ weights["up_proj.weight"].T)
    expected = x.double() + inner @ weights["down_proj.weight"].T
    mlp.add_to(x, norm.later(x))
    close(x, expected, dtype)


def test_what_does_not_fit_is_refused():
    kernels = torch.ops.antiphon
    x, packed = torch.randn(2, 64), kernels.pack_linear(torch.randn(40, 64))
    with pytest.raises(RuntimeError, match="norm does not fit"):
        kernels.linear(x, packed, 40, None, False, torch.randn(63), 1e-5)
    with pytest.raises(RuntimeError, match="rows do not fit"):
        kernels.linear_onto(torch.randn(3, 40), x, packed, None)
    with pytest.raises(RuntimeError, match="packed weight"):
        kernels.linear_onto(torch.randn(2, 73), x, packed, None)
    square = kernels.pack_linear(torch.randn(64, 64))
    with pytest.raises(RuntimeError, match="rows that it is made of"):
        kernels.linear_onto(x, x, square, None)
    with pytest.raises(RuntimeError, match="two halves"):
        kernels.pack_linear(torch.randn(41, 64), True)
    with pytest.raises(RuntimeError, match="two halves"):
        kernels.linear(x, kernels.pack_linear(torch.randn(41, 64)), 41, None, False, gated=True)
    with pytest.raises(RuntimeError, match="not wide"):
        kernels.linear(x, packed, 40, None, True, gated=True)
