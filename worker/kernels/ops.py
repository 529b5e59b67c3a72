"""The small operations between the large products: each as a kernel and in plain torch.

The torch form is the specification, and what runs where the kernels do not. All compute in fp32
and round once at the end of a kernel; torch may round in between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Complex64, Float, Int64
from torch import Tensor

from worker.kernels.load import suits


def rms_norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "size"], eps: float
) -> Float[Tensor, "*rows size"]:
    """Rows divided by their root mean square, times ``weight``."""
    if suits(x) and x.dim() in (2, 3):
        out: Tensor = torch.ops.antiphon.rms_norm(x, weight, eps)
        return out
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "size"], eps: float
) -> Float[Tensor, "*rows size"]:
    """The same in place; ``x`` may be a view."""
    if suits(x) and x.dim() in (2, 3):
        torch.ops.antiphon.rms_norm_(x, weight, eps)
        return x
    return x.copy_(F.rms_norm(x, weight.shape, weight, eps))


def add_(
    x: Float[Tensor, "rows size"], delta: Float[Tensor, "rows size"]
) -> Float[Tensor, "rows size"]:
    """Add ``delta`` to ``x`` in place."""
    if suits(x):
        torch.ops.antiphon.add_(x, delta)
        return x
    return x.add_(delta)


def rotate_(
    x: Float[Tensor, "T heads dim"], rotations: Complex64[Tensor, "T 1 pairs"]
) -> Float[Tensor, "T heads dim"]:
    """Turn neighbouring pairs of every head, in place; ``x`` may be a view."""
    if suits(x):
        torch.ops.antiphon.rotate_(x, rotations)
        return x
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))  # [T, heads, dim/2]
    return x.copy_(torch.view_as_real(pairs * rotations).flatten(-2))


def silu_mul(x: Float[Tensor, "rows both"]) -> Float[Tensor, "rows half"]:
    """silu(first half) * second half: what the kernels do within a gated linear."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def argmax(x: Float[Tensor, "rows size"]) -> Int64[Tensor, "rows"]:
    """The place of each row's largest number, the first of equal ones."""
    if suits(x) and x.dtype == torch.float32:
        out: Tensor = torch.ops.antiphon.argmax(x)
        return out
    return x.argmax(dim=-1)
