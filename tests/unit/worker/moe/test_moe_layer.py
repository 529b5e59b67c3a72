"""The mixture of experts against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.specs import mixture
from worker.layers.norm import Normed
from worker.moe.gate import Routing, route
from worker.moe.layer import MoeLayer, combine, group


def mlp(weights, prefix, x):
    gate, up, down = (weights[f"{prefix}.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("shared", [0, 2])
def test_layer_equals_a_loop_over_tokens(tokens, shared):
    torch.manual_seed(tokens)
    spec = mixture(shared_experts=shared)
    layer = MoeLayer(spec, 24, torch.float32)
    weights = {}
    for name, slot in layer.slots("mlp."):
        weights[name] = torch.randn(slot.shape) / 5
        slot.fill(weights[name])
    layer.pack()
    normed = Normed(torch.randn(tokens, 24), torch.rand(24), 1e-5)
    x = normed.now()
    bias = weights["mlp.gate.e_score_correction_bias"]
    routing = route(spec, F.linear(x, weights["mlp.gate.weight"]), bias)
    stream = torch.randn(tokens, 24)
    expected = stream.clone()
    for t in range(tokens):
        for expert, weight in zip(routing.experts[t], routing.weights[t], strict=True):
            expected[t] += weight * mlp(weights, f"mlp.experts.{expert}", x[t : t + 1])[0]
    if shared:
        expected += mlp(weights, "mlp.shared_experts", x)
        assert weights["mlp.shared_experts.up_proj.weight"].shape == (32, 24)
    layer.add_to(stream, normed)
    torch.testing.assert_close(stream, expected, rtol=1e-4, atol=1e-4)


def test_grouping_sorts_copies_by_expert():
    x = torch.tensor([[1.0], [2.0], [3.0]])
    routing = Routing(torch.tensor([[2, 0], [0, 3], [2, 3]]), torch.ones(3, 2))
    grouped = group(x, routing, experts=5)
    assert grouped.x.flatten().tolist() == [1, 2, 1, 3, 2, 3]
    assert grouped.counts == [2, 0, 2, 2, 0]


def test_combining_undoes_grouping():
    x = torch.randn(7, 4)
    experts = torch.stack([torch.randperm(5)[:3] for _ in range(7)])
    routing = Routing(experts, torch.tensor([[0.5, 0.25, 0.125]]).repeat(7, 1))
    grouped = group(x, routing, experts=5)
    torch.testing.assert_close(combine(grouped.x, grouped, routing), x * 0.875)
