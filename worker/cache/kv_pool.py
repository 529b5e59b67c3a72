"""KVPool: the table from a token slot to its keys and values (or MLA latent), per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.model_spec import ModelSpec


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that one token keeps in a pool of ``dtype``, over all layers. Allocates nothing."""
    return spec.kv_numbers_per_token * dtype.itemsize


class KVPool:
    """Memory for ``tokens`` token slots, allocated and touched once. A page is one slot.

    A model has either ``k`` and ``v``, one ``[slots, kv_heads, head_dim]`` tensor a layer, or
    (MLA) ``latent``, one ``[slots, kv_lora_rank + rope_dim]`` tensor a layer. Who owns which
    slot is decided elsewhere; attention backends write and read by slot.
    """

    def __init__(self, spec: ModelSpec, tokens: int, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.dtype = dtype
        self.bytes_per_token = bytes_per_token(spec, dtype)
        self.k: tuple[Tensor, ...] = ()
        self.v: tuple[Tensor, ...] = ()
        self.latent: tuple[Tensor, ...] = ()
        if spec.mla is not None:
            shape: tuple[int, ...] = (tokens, spec.mla.latent_dim)
            self.latent = tuple(_touched(shape, dtype) for _ in range(spec.layers))
        else:
            shape = (tokens, spec.kv_heads, spec.head_dim)
            self.k = tuple(_touched(shape, dtype) for _ in range(spec.layers))
            self.v = tuple(_touched(shape, dtype) for _ in range(spec.layers))

    def regions(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes of one slot) of every tensor, in an order that all ranks share.

        Slot ``i`` of a region lies at ``address + i * bytes``; the pool must outlive its users.
        """
        tensors = self.latent or tuple(t for pair in zip(self.k, self.v, strict=True) for t in pair)
        return tuple((t.data_ptr(), t.stride(0) * t.element_size()) for t in tensors)


def _touched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # torch.zeros may take untouched pages from the system, which then run out while serving
    return torch.empty(shape, dtype=dtype).zero_()
