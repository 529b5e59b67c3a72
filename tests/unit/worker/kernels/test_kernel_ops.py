"""Every small operation as a kernel against its plain torch form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from worker.kernels import ops
from worker.kernels.load import problem, suits

pytestmark = pytest.mark.skipif(problem() is not None, reason="no C++ compiler here")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
sizes = {"rows": st.integers(1, 40), "size": st.integers(1, 300), "seed": st.integers(0, 99)}


def torch_form(function, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "suits", lambda x: False)
        return function(*args)


def close(ours, reference, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


def draw(dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@settings(max_examples=20, deadline=None)
@given(**sizes)
def test_norms(dtype, rows, size, seed):
    x, weight = draw(dtype, rows, size, seed=seed), draw(dtype, size, seed=seed + 1)
    close(ops.rms_norm(x, weight, 1e-5), torch_form(ops.rms_norm, x, weight, 1e-5), dtype)


@DTYPES
@settings(max_examples=20, deadline=None)
@given(**sizes)
def test_sums_in_place(dtype, rows, size, seed):
    x, delta = draw(dtype, rows, size, seed=seed), draw(dtype, rows, size, seed=seed + 1)
    expected = x + delta
    assert ops.add_(x, delta) is x
    assert torch.equal(x, expected)


@DTYPES
def test_norm_of_heads_in_place_leaves_the_others_alone(dtype):
    fused, weight = draw(dtype, 5, 7, 24), draw(dtype, 24)
    expected = fused.clone()
    expected[:, 2:5] = F.rms_norm(fused[:, 2:5], (24,), weight, 1e-6)
    view = fused[:, 2:5]
    assert ops.rms_norm_(view, weight, 1e-6) is view
    close(fused, expected, dtype)


@DTYPES
def test_rotation_of_a_view(dtype):
    fused = draw(dtype, 6, 5, 32)
    angles = torch.rand(6, 1, 12) * 7
    rotations = torch.polar(torch.ones_like(angles), angles)
    expected = fused.clone()
    torch_form(ops.rotate_, expected[:, :3, 8:], rotations)
    ops.rotate_(fused[:, :3, 8:], rotations)
    close(fused, expected, dtype)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, -3.0, float("-inf")]), min_size=37, max_size=37),
        min_size=1,
        max_size=4,
    )
)
def test_argmax_takes_the_first_of_equal_ones(values):
    rows = torch.tensor(values)
    assert ops.argmax(rows).tolist() == [row.index(max(row)) for row in values]


@pytest.mark.parametrize("place", [0, 20, 36])
def test_argmax_of_a_broken_row_is_its_nan(place):
    row = torch.arange(37.0).unsqueeze(0)
    row[0, place] = float("nan")
    assert ops.argmax(row).item() == place


@DTYPES
def test_threads_and_company_change_no_bit(dtype):
    x, weight = draw(dtype, 300, 576), draw(dtype, 576)
    norm = ops.rms_norm(x, weight, 1e-5)
    torch.set_num_threads(2)
    try:
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), norm)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(ops.rms_norm(x[7:8], weight, 1e-5), norm[7:8])


def test_what_the_kernels_do_not_know_stays_with_torch():
    assert not suits(torch.zeros(2, dtype=torch.float16))
    assert not suits(torch.zeros(2, device="meta"))
    half = draw(torch.float16, 3, 8)
    assert ops.rms_norm(half, draw(torch.float16, 8), 1e-5).dtype == torch.float16


def test_a_misfit_is_an_error_and_no_crash():
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.ops.antiphon.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5)
    odd = torch.zeros(1, 1, 7, dtype=torch.bfloat16)
    spans, slots = torch.tensor([[0, 1, 0, 1]]), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="even"):
        torch.ops.antiphon.attention(odd, odd, odd, spans, slots, 1.0)


def test_a_slot_outside_the_pool_is_an_error_and_no_crash():
    pool, rows = torch.zeros(4, 1, 8), torch.zeros(1, 1, 8)
    spans, far = torch.tensor([[0, 1, 0, 1]]), torch.tensor([4])
    with pytest.raises(RuntimeError, match="outside the pool"):
        torch.ops.antiphon.scatter_rows(pool, far, rows)
    with pytest.raises(RuntimeError, match="outside the pool"):
        torch.ops.antiphon.attention(rows, pool, pool, spans, far, 1.0)
    with pytest.raises(RuntimeError, match="outside the step"):
        torch.ops.antiphon.attention(rows, pool, pool, torch.tensor([[0, 2, 0, 2]]), far, 1.0)
