"""Build ForwardInput by hand: sequences with scattered slots, advanced by any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.cache.kv_pool import KVPool
from worker.models.base import Model
from worker.pack import ForwardInput


class Row:
    """One sequence: its token ids, the slots of all of them, and how many are computed."""

    def __init__(self, ids: Sequence[int], slots: Sequence[int], done: int = 0) -> None:
        assert len(slots) >= len(ids)
        self.ids = list(ids)
        self.slots = list(slots)
        self.done = done


def scattered(tokens: int, seed: int = 0) -> list[int]:
    """All slots of a pool in random order."""
    return torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)).tolist()


def make_step(parts: Sequence[tuple[Row, int]]) -> ForwardInput:
    """The step that computes the next ``n`` tokens of each row, asking for all logits."""
    ids, positions, write, starts, lens, slots = [], [], [], [0], [], []
    for row, n in parts:
        ids += row.ids[row.done : row.done + n]
        positions += range(row.done, row.done + n)
        write += row.slots[row.done : row.done + n]
        starts.append(len(ids))
        lens.append(row.done + n)
        slots.append(torch.tensor(row.slots[: row.done + n]))
    return ForwardInput(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        write_slots=torch.tensor(write),
        query_start=tuple(starts),
        kv_lens=tuple(lens),
        slots=tuple(slots),
        logit_rows=torch.arange(len(ids)),
    )


def advance(model: Model, pool: KVPool, parts: Sequence[tuple[Row, int]]) -> list[torch.Tensor]:
    """Run one step; returns the logits [n, vocab] of each row's new tokens."""
    step = make_step(parts)
    logits = model.forward(step, pool)
    for row, n in parts:
        row.done += n
    return list(logits.split([n for _, n in parts]))
