"""Which experts the gates choose, with what weights, on scores written out by hand."""

from __future__ import annotations

import pytest
import torch

from tests.support.specs import mixture
from worker.moe.gate import route


def chosen(routing, row=0):
    """{expert: weight} of one token."""
    pairs = zip(routing.experts[row].tolist(), routing.weights[row].tolist(), strict=True)
    return dict(pairs)


def logit(scores):
    return torch.logit(torch.tensor([scores]))


def test_v3_sums_the_two_best_of_a_group():
    # groups of two: sums 0.9, 1.0, 0.6, 0.1; groups 0 and 1 stay, although expert 4 beats 1, 2, 3
    logits = logit([0.8, 0.1, 0.5, 0.5, 0.58, 0.02, 0.05, 0.05])
    weights = chosen(route(mixture(norm_topk=False, scaling=2.0), logits, torch.zeros(8)))
    assert weights == pytest.approx({0: 1.6, 2: 1.0, 3: 1.0})


def test_v3_weights_are_normalised_then_scaled():
    logits = logit([0.8, 0.1, 0.5, 0.5, 0.58, 0.02, 0.05, 0.05])
    weights = chosen(route(mixture(), logits, torch.zeros(8)))
    assert weights == pytest.approx({0: 2.5 * 0.8 / 1.8, 2: 2.5 * 0.5 / 1.8, 3: 2.5 * 0.5 / 1.8})


def test_v3_bias_moves_the_choice_but_not_the_weights():
    logits = logit([0.8, 0.1, 0.5, 0.51, 0.58, 0.02, 0.05, 0.05])
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0, 2.0, 2.0])
    weights = chosen(route(mixture(norm_topk=False, scaling=1.0), logits, bias))
    assert weights == pytest.approx({6: 0.05, 7: 0.05, 3: 0.51})


def test_v3_never_leaves_the_best_groups_even_with_negative_choices():
    logits, bias = torch.randn(50, 8), torch.full((8,), -3.0)
    experts = route(mixture(), logits, bias).experts
    groups = (logits.sigmoid() - 3).view(50, 4, 2).sum(-1).topk(2).indices
    assert all(
        set((row // 2).tolist()) <= set(best.tolist())
        for row, best in zip(experts, groups, strict=True)
    )


def test_v2_greedy_takes_the_best_of_all():
    logits = torch.tensor([[4.0, 0, 3, 0, 2, 0, 1, 0]])
    weights = chosen(route(mixture("greedy", norm_topk=False, scaling=1.0), logits, None))
    probabilities = logits.softmax(-1)[0]
    assert weights == pytest.approx({i: probabilities[i].item() for i in (0, 2, 4)})


def test_v2_groups_are_worth_their_best_expert():
    # by sums groups 1 and 2 would win
    logits = torch.tensor([[4.0, -9, 2, 2, 2, 2, 3, -9]])
    weights = chosen(route(mixture("group_limited_greedy", topk=2, scaling=1.0), logits, None))
    assert set(weights) == {0, 6}
    assert sum(weights.values()) == pytest.approx(1.0)


def test_groups_of_one_expert():
    logits = logit([0.8, 0.1, 0.5, 0.4, 0.58, 0.02, 0.05, 0.06])
    routing = route(mixture(groups=8, topk_groups=3), logits, torch.zeros(8))
    assert set(chosen(routing)) == {0, 2, 4}
