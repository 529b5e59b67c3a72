"""KVPool: the table from a token slot to its keys and values (or MLA latent), per layer.

Several layers of a token lie side by side, so a run of tokens is a few long stretches of memory.
Transfers pay by the stretch: with a tensor for each layer they would pay ten times as often.
"""

from __future__ import annotations

import mmap

import torch
from jaxtyping import Int64
from torch import Tensor

from core.shared_memory import SharedMemory
from worker.model_spec import ModelSpec


class KVPool:
    """Memory for ``tokens`` token slots, allocated and touched once. A page is a few in a row.

    A model has either ``k`` and ``v``, one ``[slots, kv_heads, head_dim]`` tensor a layer, or
    (MLA) ``latent``, one ``[slots, kv_lora_rank + rope_dim]`` tensor a layer: views of blocks of
    several layers, and of one stretch of memory in all. Who owns which slot is decided elsewhere;
    attention backends write and read by slot. With ``shared`` other processes can map the memory.
    """

    def __init__(
        self, spec: ModelSpec, tokens: int, dtype: torch.dtype, *, shared: bool = False
    ) -> None:
        self.tokens = tokens
        self.dtype = dtype
        self.bytes_per_token = spec.kv_slot_bytes(dtype.itemsize)
        self._memory = SharedMemory(tokens * self.bytes_per_token) if shared else None
        whole = _touched(tokens * self.bytes_per_token // dtype.itemsize, dtype, self._memory)
        blocks = spec.kv_blocks(dtype.itemsize)
        widths = [block.slot_bytes // dtype.itemsize for block in blocks]
        parts = torch.split(whole, [tokens * width for width in widths])
        self._blocks = tuple(p.view(tokens, width) for p, width in zip(parts, widths, strict=True))
        numbers = spec.kv_numbers_per_token // spec.layers
        layers = tuple(
            view[:, at * numbers : (at + 1) * numbers]
            for view, block in zip(self._blocks, blocks, strict=True)
            for at in range(block.layers)
        )
        self.k: tuple[Tensor, ...] = ()
        self.v: tuple[Tensor, ...] = ()
        self.latent: tuple[Tensor, ...] = ()
        if spec.mla is not None:
            self.latent = layers
        else:
            both = [row.view(tokens, 2, spec.kv_heads, spec.head_dim) for row in layers]
            self.k, self.v = tuple(kv[:, 0] for kv in both), tuple(kv[:, 1] for kv in both)

    def copy(self, source: Int64[Tensor, "n"], target: Int64[Tensor, "n"]) -> None:
        """Copy what lies in each slot of ``source`` to ``target``, in every layer.

        No slot is a source and a target.
        """
        for block in self._blocks:
            block.index_copy_(0, target, block[source])

    def regions(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes of one slot) of each block, in an order that all ranks share.

        Slot ``i`` of a region lies at ``address + i * bytes``; the pool must outlive its users.
        """
        return tuple((b.data_ptr(), b.stride(0) * b.element_size()) for b in self._blocks)

    @property
    def span(self) -> tuple[int, int]:
        """(address, bytes) of the memory in which all regions lie."""
        return self._blocks[0].data_ptr(), self.tokens * self.bytes_per_token

    @property
    def file(self) -> int:
        """The descriptor of shared memory, which ``span`` fills; else -1."""
        return -1 if self._memory is None else self._memory.file


def _touched(numbers: int, dtype: torch.dtype, memory: SharedMemory | None) -> Tensor:
    if memory is not None:
        return torch.frombuffer(memory.buffer, dtype=dtype)
    # mapped here and not by torch, which does not ask for huge pages; and touched, because
    # untouched pages may run out while serving
    own = mmap.mmap(-1, max(1, numbers * dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        own.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(own, dtype=dtype, count=numbers).zero_()
