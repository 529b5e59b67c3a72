"""The KV memory of one simulated rank: real bytes, and an owner for each slot."""

from __future__ import annotations

import random

import numpy as np

from disagg.transport.base import MemoryRegion

SLOTS = 48
SLOT_BYTES = (8, 4, 8)  # of each region


class Pool:
    """Memory of one rank: slots with an owner each; None is free."""

    def __init__(self, rng: random.Random) -> None:
        self.regions = [
            np.frombuffer(rng.randbytes(SLOTS * size), np.uint8).copy().reshape(SLOTS, size)
            for size in SLOT_BYTES
        ]
        self.owner: list[int | None] = [None] * SLOTS
        self.bases = [int(region.ctypes.data) for region in self.regions]

    def memory(self) -> list[MemoryRegion]:
        return [MemoryRegion(int(r.ctypes.data), r.nbytes) for r in self.regions]

    def take(self, room: int, count: int, rng: random.Random) -> np.ndarray | None:
        free = [slot for slot, owner in enumerate(self.owner) if owner is None]
        if len(free) < count:
            return None
        chosen = free[:count] if rng.random() < 0.5 else rng.sample(free, count)
        for slot in chosen:
            self.owner[slot] = room
        return np.array(chosen, dtype=np.int32)

    def free(self, room: int, rng: random.Random) -> None:
        """Give the room's slots back, and write something else into them."""
        for slot, owner in enumerate(self.owner):
            if owner == room:
                self.owner[slot] = None
                self.fill(slot, rng)

    def fill(self, slot: int, rng: random.Random) -> None:
        for region, size in zip(self.regions, SLOT_BYTES, strict=True):
            region[slot] = np.frombuffer(rng.randbytes(size), np.uint8)

    def read(self, slots: np.ndarray) -> list[bytes]:
        return [region[slots].tobytes() for region in self.regions]

    def owners_of(self, address: int, length: int) -> set[int | None] | None:
        """Owners of the slots behind an address range; None when it is not in this pool."""
        for base, size, region in zip(self.bases, SLOT_BYTES, self.regions, strict=True):
            if base <= address < base + region.nbytes:
                first, last = (address - base) // size, (address + length - 1 - base) // size
                return {self.owner[slot] for slot in range(first, last + 1)}
        return None
