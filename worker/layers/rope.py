"""Rotary position embeddings: plain, Llama-3 scaling and YaRN.

Rotary partners are neighbours here: (x0, x1), (x2, x3), .. are complex numbers, and a rotation is
one complex multiplication. Checkpoints with split halves are reordered while loading.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Complex64, Float, Int64
from torch import Tensor

from worker.model_spec import RopeSpec

Rotations = Complex64[Tensor, "T 1 pairs"]


class Rope:
    """The table of rotations for every position of a context, computed once."""

    def __init__(self, spec: RopeSpec, dim: int, context_len: int) -> None:
        angles = torch.outer(torch.arange(context_len, dtype=torch.float32), frequencies(spec, dim))
        self._table = torch.polar(torch.full_like(angles, magnitude(spec)), angles)

    def at(self, positions: Int64[Tensor, "T"]) -> Complex64[Tensor, "T 1 pairs"]:
        """The rotations of a step's tokens; broadcasts over heads. Take them once per step."""
        return self._table.index_select(0, positions).unsqueeze(1)


def frequencies(spec: RopeSpec, dim: int) -> Float[Tensor, "pairs"]:
    """Radians per position of each of the dim/2 pairs."""
    base = 1.0 / torch.pow(spec.theta, torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "yarn":
        return _yarn(spec, base, dim)
    return base


def magnitude(spec: RopeSpec) -> float:
    """What rotated vectors are multiplied by: 1, except for some YaRN models."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return yarn_mscale(spec.factor, spec.mscale) / yarn_mscale(spec.factor, spec.mscale_all_dim)
    return yarn_mscale(spec.factor, 1.0)


def softmax_scale(spec: RopeSpec, head_dim: int) -> float:
    """What MLA scores are multiplied by; a stretched context (YaRN) changes it."""
    scale = 1.0 / math.sqrt(head_dim)
    if spec.kind == "yarn" and spec.mscale_all_dim:
        scale *= yarn_mscale(spec.factor, spec.mscale_all_dim) ** 2
    return scale


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's correction for the sharper softmax of a stretched context."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(spec: RopeSpec, base: Float[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
    """Slow pairs are stretched by the factor, fast ones are kept, those between are blended."""
    turns = spec.original_context * base / (2 * math.pi)  # within the original context
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    return torch.lerp(base / spec.factor, base, keep.clamp(0, 1))


def _yarn(spec: RopeSpec, base: Float[Tensor, "pairs"], dim: int) -> Float[Tensor, "pairs"]:
    """Like llama3, but blended linearly in the index of the pair instead of in its turns."""

    def pair_with(turns: float) -> float:
        span = spec.original_context / (turns * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(spec.theta))

    low = max(math.floor(pair_with(spec.beta_fast)), 0)
    high = min(math.ceil(pair_with(spec.beta_slow)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32)
    stretch = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return torch.lerp(base, base / spec.factor, stretch)
