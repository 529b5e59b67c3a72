"""A matrix for each group of rows, as kernels and in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from worker.kernels.load import problem
from worker.layers.grouped import GroupedLinear

KERNELS = pytest.mark.skipif(problem() is not None, reason="no C++ compiler here")


def filled(groups, inner, parts, dtype):
    linear = GroupedLinear(groups, inner, parts, dtype)
    disk = {}
    for name, slot in linear.slots("experts."):
        disk[name] = torch.randn(slot.shape).to(dtype) / 8
        slot.fill(disk[name])
    return linear, disk


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=9),
    half=st.integers(1, 90),
    outer=st.integers(1, 90),
    seed=st.integers(0, 99),
)
def test_packed_and_dense(dtype, counts, half, outer, seed):
    torch.manual_seed(seed)
    linear, disk = filled(len(counts), 2 * half, {"up": outer, "gate": 3}, dtype)
    x = torch.randn(sum(counts), 2 * half).to(dtype)
    dense = linear(x, counts)
    linear.pack()
    torch.set_num_threads(2)
    packed = linear(x, counts)
    torch.set_num_threads(1)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(packed, dense, **tolerance)
    start = 0
    for group, count in enumerate(counts):
        own = x[start : start + count]
        weight = torch.cat(
            [disk[f"experts.{group}.up.weight"], disk[f"experts.{group}.gate.weight"]]
        )
        torch.testing.assert_close(dense[start : start + count], F.linear(own, weight), **tolerance)
        alone = [count if g == group else 0 for g in range(len(counts))]
        assert torch.equal(linear(own, alone), packed[start : start + count])
        start += count


@KERNELS
def test_counts_must_be_those_of_the_rows():
    linear, _ = filled(2, 8, {"up": 4}, torch.float32)
    linear.pack()
    with pytest.raises(RuntimeError, match="counts"):
        linear(torch.randn(5, 8), [2, 2])
    with pytest.raises(RuntimeError, match="negative"):
        linear(torch.randn(5, 8), [6, -1])
    with pytest.raises(RuntimeError, match="packed weight"):
        linear(torch.randn(5, 8), [5])
