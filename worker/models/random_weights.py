"""Random weights for a model folder that has none: models of any size for trying things out."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from worker.architectures import read_spec
from worker.attention.registry import ATTENTION
from worker.checkpoint import SINGLE
from worker.models.assemble import assemble


def write_random_weights(folder: Path, seed: int) -> None:
    """Write model.safetensors for the config.json in ``folder``, in its dtype.

    Matrices are scaled by their inner size, so that hidden states neither vanish nor explode and
    logits differ from token to token. The same seed gives the same weights.
    """
    spec = read_spec(folder)
    dtype = getattr(torch, spec.dtype)
    model = assemble(spec, dtype, ATTENTION.load("torch")())
    generator = torch.Generator().manual_seed(seed)
    weights = {n: _draw(n, s.shape, generator).to(dtype) for n, s in model.slots()}
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise / math.sqrt(shape[-1])
    return 1.0 + 0.1 * noise if name.endswith("norm.weight") else 0.1 * noise
