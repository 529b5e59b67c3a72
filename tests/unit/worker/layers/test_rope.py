"""Rotary frequencies against published figures, and what a rotation keeps."""

from __future__ import annotations

import math

import pytest
import torch

from worker.kernels.ops import rotate_
from worker.layers.rope import Rope, frequencies, magnitude, softmax_scale
from worker.model_spec import RopeSpec

# of DeepSeek-V3's config.json
V3 = RopeSpec(
    theta=10_000.0,
    kind="yarn",
    factor=40.0,
    original_context=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)
# of Llama-3.1's config.json
LLAMA3 = RopeSpec(
    theta=500_000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_context=8192,
)


def test_plain_frequencies():
    expected = [10_000 ** (-i / 4) for i in range(4)]
    torch.testing.assert_close(frequencies(RopeSpec(theta=1e4), 8), torch.tensor(expected))


def test_yarn_of_deepseek_v3():
    ours = frequencies(V3, 64)
    known = {
        0: 1.0,
        10: 0.056234133,
        11: 0.039006927,
        16: 0.0055,
        22: 1.7782794e-4,
        23: 3.3338036e-5,
        31: 3.3338036e-6,
    }
    for index, value in known.items():
        assert ours[index].item() == pytest.approx(value, rel=1e-5)
    assert magnitude(V3) == 1.0
    assert softmax_scale(V3, 192) == pytest.approx(0.13523378, rel=1e-6)
    assert softmax_scale(RopeSpec(theta=1e4), 192) == pytest.approx(0.07216878, rel=1e-6)


def test_yarn_without_mscale_enlarges_the_vectors():
    assert magnitude(RopeSpec(theta=1e4, kind="yarn", factor=40.0)) == pytest.approx(1.3688879)
    given = RopeSpec(theta=1e4, kind="yarn", factor=40.0, attention_factor=1.5)
    assert magnitude(given) == 1.5
    assert (
        Rope(
            RopeSpec(theta=1e4, kind="yarn", factor=2.0, original_context=64, attention_factor=1.5),
            8,
            4,
        )
        .at(torch.tensor([3]))
        .abs()
        .allclose(torch.tensor(1.5))
    )


def test_llama3_keeps_fast_pairs_and_stretches_slow_ones():
    plain, ours = frequencies(RopeSpec(theta=500_000.0), 128), frequencies(LLAMA3, 128)
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    assert torch.equal(ours[fast], plain[fast])
    torch.testing.assert_close(ours[slow], plain[slow] / 8)
    between = ~fast & ~slow
    assert between.sum() == 6
    assert ((ours < plain) & (ours > plain / 8))[between].all()


def test_products_depend_on_distance_alone():
    rope = Rope(RopeSpec(theta=1e4), 16, 100)
    q, k = torch.randn(1, 3, 16), torch.randn(1, 3, 16)

    def product(at_q, at_k):
        a, b = rope.at(torch.tensor([at_q])), rope.at(torch.tensor([at_k]))
        return (rotate_(q.clone(), a) * rotate_(k.clone(), b)).sum(-1)

    torch.testing.assert_close(product(5, 2), product(93, 90), rtol=0, atol=1e-4)
    torch.testing.assert_close(product(7, 7), (q * k).sum(-1))
    assert not torch.allclose(product(5, 2), product(5, 3))


def test_rotation_is_fp32_inside():
    rotations = Rope(RopeSpec(theta=1e4), 16, 100).at(torch.tensor([99]))
    x = torch.randn(1, 2, 16).bfloat16()
    assert torch.equal(rotate_(x.float(), rotations).bfloat16(), rotate_(x.clone(), rotations))
