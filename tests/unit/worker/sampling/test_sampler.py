"""Which tokens may be chosen, how often each one is, and that nothing but the seed decides.

Everything runs in both forms: the kernel, and plain torch, which is its specification.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from core.wire import SamplingParams
from worker.kernels.load import problem
from worker.plan import SampleRow
from worker.sampling import sampler
from worker.sampling.draw import SHORTLIST, limit
from worker.sampling.sampler import arguments, sample


@pytest.fixture(params=["kernel", "torch"], scope="module", autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(sampler, "suits", lambda x: False)
        elif problem() is not None:
            pytest.skip("no C++ compiler here")
        yield request.param


def row(index: int = 0, position: int = 0, **params: object) -> SampleRow:
    return SampleRow(index, position, SamplingParams(max_new_tokens=1, **params))


def allowed(logits: np.ndarray, top_k: int, top_p: float, min_p: float = 0.0) -> set[int] | None:
    """The slow reference: token by token in order of probability. None where rounding decides."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if min_p:
        share = np.exp(logits - logits.max())
        if (abs(share - min_p) < 1e-6).any():
            return None
        order = [token for token in order if share[token] >= min_p]
    if top_k:
        last = logits[order[min(top_k, len(order)) - 1]]
        order = [token for token in order if logits[token] >= last]
    weights = np.exp(logits[order] - logits[order[0]])
    mass = 0.0
    for token, share in zip(order, weights / weights.sum(), strict=True):
        mass += share
        if abs(mass - top_p) < 1e-5:
            return None
        if mass > top_p:
            return {other for other in order if logits[other] >= logits[token]}
    return set(order)


def kept(logits: torch.Tensor, form: str, **params: object) -> set[int]:
    """Tokens that the filters leave at temperature 1."""
    distance, sample_row = logits.max() - logits, row(**params)
    if form == "torch":
        last = limit(distance, sample_row.params)
    else:
        last = torch.ops.antiphon.sample(logits.unsqueeze(0), *arguments((sample_row,)))[1][0]
    return set((distance <= last).nonzero().flatten().tolist())


LOGITS = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    logits=LOGITS,
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
)
def test_the_filters_keep_what_the_reference_keeps(form, logits, top_k, top_p, min_p):
    wanted = allowed(np.array(logits), top_k, 2.0 if top_p == 1.0 else top_p, min_p)
    assume(wanted is not None)
    assert kept(torch.tensor(logits), form, top_k=top_k, top_p=top_p, min_p=min_p) == wanted


def test_ties_with_the_last_token_stay_in(form):
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0])
    assert kept(logits, form, top_k=2) == {0, 2, 3}
    assert kept(torch.zeros(4), form, top_p=0.4) == {0, 1, 2, 3}


def test_the_nucleus_is_measured_within_the_top_k(form):
    logits = torch.tensor([0.4, 0.31, 0.2, 0.09]).log()
    assert kept(logits, form, top_p=0.5) == {0, 1}
    assert kept(logits, form, top_k=2, top_p=0.5) == {0}  # 0.4 of 0.71


def test_who_has_no_probability_is_never_chosen(form):
    logits = torch.full((20, 70), -torch.inf)
    logits[:, 66] = 1.0
    rows = tuple(row(i, seed=i, top_k=3, top_p=0.999999) for i in range(20))
    assert sample(logits, rows).tolist() == [66] * 20


@pytest.mark.parametrize("vocab", [50, 5000])
def test_the_top_k_of_many_are_the_best_ones(form, vocab):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    for top_k in (1, 7, vocab // 3, vocab - 1):
        wanted = set(torch.topk(logits, top_k).indices.tolist())
        assert kept(logits, form, top_k=top_k) == wanted


def test_a_nucleus_wider_than_the_shortlist_is_found(form):
    vocab = 3 * SHORTLIST
    logits = torch.linspace(0.0, -0.1, vocab)
    probability = logits.double().softmax(0).cumsum(0)
    wanted = int((probability < 0.9).sum()) + 1
    assert SHORTLIST < wanted < vocab
    shuffled = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))
    found = kept(logits[shuffled], form, top_p=0.9)
    assert abs(len(found) - wanted) <= 2  # of float32
    assert min(logits[shuffled][sorted(found)]) >= logits[wanted + 1]


def test_temperature_zero_is_greedy_and_the_first_of_equals_wins():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 0.0]])
    rows = (row(0, temperature=0.0, seed=1), row(1, temperature=0.0, seed=2))
    assert sample(logits, rows).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-40, 1e-300])
def test_a_temperature_close_to_zero_is_greedy_too(temperature):
    logits = torch.tensor([[30.0, 31.0, 29.0, -5.0]]).repeat(20, 1)
    rows = tuple(row(i, temperature=temperature, seed=i, top_p=0.9) for i in range(20))
    assert sample(logits, rows).tolist() == [1] * 20


def test_at_the_lowest_temperatures_equals_still_take_turns():
    logits = torch.tensor([[31.0, 31.0, 30.0]]).repeat(40, 1)
    rows = tuple(row(i, temperature=1e-300, seed=i) for i in range(40))
    assert set(sample(logits, rows).tolist()) == {0, 1}


def test_a_high_temperature_flattens_the_distribution():
    logits = torch.tensor([[4.0, 0.0]]).repeat(400, 1)
    counts = {
        temperature: int(
            sample(logits, tuple(row(i, temperature=temperature, seed=i) for i in range(400))).sum()
        )
        for temperature in (1.0, 4.0)
    }
    assert counts[1.0] < 30 < 80 < counts[4.0]  # 7 and 107 expected


def test_sampling_nothing_gives_nothing():
    assert sample(torch.zeros(0, 5), ()).tolist() == []


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations(range(5)),
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5),
    position=st.integers(0, 100_000),
    top_p=st.sampled_from([0.7, 1.0]),
)
def test_a_seeded_token_does_not_depend_on_the_batch_or_the_place_in_it(
    order, seeds, position, top_p
):
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(position))
    params = [
        {"temperature": 0.0 if i == 2 else 0.8, "seed": seed, "top_p": top_p}
        for i, seed in enumerate(seeds)
    ]
    alone = [int(sample(logits[i : i + 1], (row(0, position + i, **params[i]),))) for i in range(5)]
    rows = tuple(row(at, position + i, **params[i]) for at, i in enumerate(order))
    assert sample(logits[list(order)], rows).tolist() == [alone[i] for i in order]


def chi_square(tokens: list[int], probability: torch.Tensor) -> float:
    counts = np.bincount(tokens, minlength=len(probability))
    expected = len(tokens) * probability.double().numpy()
    return float(((counts - expected) ** 2 / expected).sum())


BOUND = 23.5  # one in ten thousand for four degrees of freedom


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_tokens_come_as_often_as_their_probability_says(form, varied):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    draws = 2000 if form == "kernel" else 1000
    rows = tuple(
        row(i, temperature=0.7, position=7, seed=i)
        if varied == "seed"
        else row(i, temperature=0.7, position=i, seed=11)
        for i in range(draws)
    )
    tokens = sample(logits.repeat(draws, 1), rows).tolist()
    assert chi_square(tokens, (logits / 0.7).softmax(0)) < BOUND
    assert chi_square(tokens, logits.softmax(0)) > BOUND  # the test can tell


def test_neighbouring_positions_are_independent():
    logits = torch.zeros(2)
    tokens = sample(logits.repeat(801, 1), tuple(row(i, i, seed=5) for i in range(801))).tolist()
    pairs = [2 * a + b for a, b in pairwise(tokens)]
    assert chi_square(pairs, torch.full((4,), 0.25)) < BOUND


def test_negative_seeds_are_seeds_too():
    logits = torch.zeros(1, 1000)
    one, other = (int(sample(logits, (row(seed=seed),))) for seed in (-1, -2))
    assert one != other


@pytest.mark.parametrize("params", [{}, {"top_k": 30}, {"top_p": 0.9}, {"top_p": 0.7, "top_k": 90}])
def test_tokens_of_a_large_vocabulary_come_as_often_as_they_should(form, params):
    vocab, draws = 200, 20_000 if form == "kernel" else 500
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(4)) * 2
    left = sorted(kept(logits, form, **params))
    probability = torch.zeros(vocab).index_put((torch.tensor(left),), logits[left].softmax(0))
    tokens = sample(
        logits.repeat(draws, 1), tuple(row(i, i, seed=9, **params) for i in range(draws))
    )
    assert set(tokens.tolist()) <= set(left)
    # Four parts of about the same probability, of tokens far apart.
    part = (probability.cumsum(0) * 4).long().clamp(max=3)
    expected = torch.zeros(4).index_add(0, part, probability)
    assert chi_square(part[tokens].tolist(), expected) < BOUND


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_give_a_token_all_the_same(form, value):
    logits = torch.zeros(1, 100)
    logits[0, 77] = value
    if value == -torch.inf:
        logits[:] = value
    wanted = 0 if value == -torch.inf else 77
    assert sample(logits, (row(seed=3, top_p=0.9, top_k=5),)).tolist() == [wanted]


def test_threads_change_no_token(form):
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(6))
    rows = tuple(row(i, seed=i, top_p=0.8, temperature=i % 3) for i in range(20))
    alone = sample(logits, rows).tolist()
    torch.set_num_threads(3)
    try:
        assert sample(logits, rows).tolist() == alone
    finally:
        torch.set_num_threads(1)
