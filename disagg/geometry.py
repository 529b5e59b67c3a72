"""What a KV pool looks like, whether two pools agree, and which bytes go where.

Counted in token slots, whatever the size of a page: a copy may begin and end inside one. A pool
is a list of regions (per layer K, then V; or the MLA latent), each an array of slots: slot ``s`` of
a region lies at ``base + s * bytes per slot``. Both ranks list their regions in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from core.wire import KV_DIFFERS, Int32Array
from disagg.transport.base import Copy


class PageGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must be equal on both ranks for a raw copy to mean the same KV."""

    kind: Literal["mha", "mla"]  # K and V per head, or one latent per token
    slot_bytes: tuple[int, ...]  # of each region, in bytes
    dtype: str
    revision: str  # of the model's weights
    page_size: int = 1  # tokens
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all regions."""
        return sum(self.slot_bytes)

    def pages(self, start: int, stop: int) -> int:
        """In how many pages the tokens [start, stop) of a sequence lie."""
        return -(-stop // self.page_size) - start // self.page_size if stop > start else 0


def mismatch(prefill: PageGeometry, decode: PageGeometry) -> str | None:
    """Name every field in which the two differ, with both values; None when they agree."""
    different = []
    for field in PageGeometry.__struct_fields__:
        mine, other = getattr(prefill, field), getattr(decode, field)
        if mine == other:
            continue
        if field == "slot_bytes":
            mine, other = _in_words(mine), _in_words(other)
        different.append(f"{field} is {mine!r} at the prefill rank, {other!r} at the decode rank")
    return f"{KV_DIFFERS}: {'; '.join(different)}" if different else None


def _in_words(slot_bytes: tuple[int, ...]) -> str:
    return f"{sum(slot_bytes)} bytes in {len(slot_bytes)} regions"


def copies(
    geometry: PageGeometry,
    source_bases: Sequence[int],
    source_slots: Int32Array,
    target_bases: Sequence[int],
    target_slots: Int32Array,
) -> list[Copy]:
    """The copies that bring ``source_slots[i]`` to ``target_slots[i]`` in every region.

    Neighbours that are consecutive on both sides become one copy: transports pay by the block.
    """
    regions = len(geometry.slot_bytes)
    assert len(source_bases) == len(target_bases) == regions, (source_bases, target_bases)
    assert source_slots.shape == target_slots.shape, (source_slots.shape, target_slots.shape)
    if len(source_slots) == 0:
        return []
    source = source_slots.astype(np.int64)
    target = target_slots.astype(np.int64)
    breaks = (np.diff(source) != 1) | (np.diff(target) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))  # index of each run's first slot
    lengths = np.diff(np.append(starts, len(source)))  # slots in each run
    size = np.asarray(geometry.slot_bytes, dtype=np.int64)[:, None]
    from_base = np.asarray(source_bases, dtype=np.int64)[:, None]
    to_base = np.asarray(target_bases, dtype=np.int64)[:, None]
    columns = (
        from_base + source[starts] * size,  # [regions, runs]
        to_base + target[starts] * size,
        lengths * size,
    )
    return [Copy(*row) for row in zip(*(c.ravel().tolist() for c in columns), strict=True)]
