"""Seeded random numbers, one per token id: Philox4x32-10, a counter-based generator.

After Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). Keyed by a seed, the
block (n // 64 * 16 + n % 16, position) has four words, and word n // 16 % 4 is token n's: so
vectors of up to 16 blocks give neighbouring tokens. worker/kernels/sampling.cpp makes them, too.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

BLOCKS, WORDS = 16, 4  # a group of tokens: so many blocks, one after the other
_MASK = 2**32 - 1
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85  # of the keys, from round to round
_ROUNDS = 10


def uniform(
    seed: int, position: int, vocab: int, device: torch.device | str = "cpu"
) -> Float64[Tensor, "vocab"]:
    """Numbers in (0, 1), multiples of 2^-33. Any integer is a seed; of equal remainders by 2^64."""
    groups = -(-vocab // (BLOCKS * WORDS))
    low = torch.arange(groups * BLOCKS, device=device)
    zero = torch.zeros_like(low)
    counter = low, zero + (position & _MASK), zero + (position >> 32), zero
    words = torch.stack(philox(counter, (seed & _MASK, (seed >> 32) & _MASK)))  # [4, groups * 16]
    in_order = words.view(WORDS, groups, BLOCKS).transpose(0, 1).reshape(-1)[:vocab]
    return (in_order.double() + 0.5) * 2.0**-32


Block = tuple[Tensor, Tensor, Tensor, Tensor]  # four words, each int64 [n] with 32 bits


def philox(counter: Block, key: tuple[int, int]) -> Block:
    """The four words of each of ``n`` counters."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 32 x 32 bits; the products wrap around in 64, as unsigned ones do
        product0, product2 = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0 = (product2 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = product2, product0  # their lower halves: the upper ones go with the next mask
        k0, k1 = (k0 + _STEPS[0]) & _MASK, (k1 + _STEPS[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK
