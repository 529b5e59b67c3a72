"""The sampling kernel against its torch form, token by token; and where torch would take long."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from core.wire import SamplingParams
from worker.kernels.load import problem
from worker.plan import SampleRow
from worker.sampling.draw import draw
from worker.sampling.sampler import sample

pytestmark = pytest.mark.skipif(problem() is not None, reason="no C++ compiler here")


def row(index: int = 0, position: int = 0, **params: object) -> SampleRow:
    return SampleRow(index, position, SamplingParams(max_new_tokens=1, **params))


@settings(max_examples=100, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 63, 64, 65, 300]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.sampled_from([1e-40, 1e-3, 0.7, 1.0, 50.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 400]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**40),
)
def test_kernel_and_torch_choose_the_same_token(
    vocab, spread, temperature, top_k, top_p, min_p, seed, position
):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(position)) * spread
    one = row(
        position=position,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    assert int(sample(logits, (one,))) == int(draw(logits[0], one))


def test_rare_tokens_are_drawn_as_rarely_as_they_should():
    draws, chance = 40_000, 5e-4
    logits = torch.tensor([0.0, np.log(chance / (1 - chance))], dtype=torch.float32)
    rows = tuple(row(i, i, seed=2) for i in range(draws))
    assert 5 <= int(sample(logits.repeat(draws, 1), rows).sum()) <= 40  # 20 expected


def test_the_winner_of_many_equals_is_not_missed():
    logits = torch.zeros(150, 1500)
    rows = tuple(row(i, position=i, seed=5) for i in range(150))
    wanted = [int(draw(logits[i], one)) for i, one in enumerate(rows)]
    assert sample(logits, rows).tolist() == wanted
