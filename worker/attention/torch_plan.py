"""One step as the torch backend sees it: decode rows in padded batches, prompts in blocks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from worker.pack import ForwardInput

# Queries of a prompt that are attended at once: few enough that a block skips most of the keys
# after it, enough to keep the matrix products busy (64 to 256 measured alike).
QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences with one new token each, of similar length, padded to the longest."""

    rows: Int64[Tensor, "n"]  # their tokens in the step
    slots: Int64[Tensor, "n_times_P"]  # [n, P] flattened; padding repeats a sequence's first slot
    mask: Bool[Tensor, "n 1 1 P"] | None  # True: attend; None: nothing is padded


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Tokens [start, stop) of the step, which see the first ``keys`` slots of their sequence."""

    start: int
    stop: int
    keys: int
    mask: Bool[Tensor, "queries keys"]


@dataclass(frozen=True, slots=True)
class Extend:
    """A sequence with several new tokens, [start, stop) of the step."""

    start: int
    stop: int
    slots: Int64[Tensor, "keys"]
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Shared by all layers of one step."""

    write_slots: Int64[Tensor, "T"]
    decodes: tuple[DecodeBatch, ...]
    extends: tuple[Extend, ...]


def make_plan(step: ForwardInput) -> TorchPlan:
    """Sort the sequences of a step into decode batches and extends."""
    buckets: dict[int, list[int]] = defaultdict(list)
    extends: list[Extend] = []
    for b, kv_len in enumerate(step.kv_lens):
        start, stop = step.query_start[b], step.query_start[b + 1]
        if stop - start == 1:
            # lengths of one bucket differ by less than a factor of two: padding stays small
            buckets[max(kv_len - 1, 64).bit_length()].append(b)
        elif stop > start:
            extends.append(_extend(start, stop, step.slots[b]))
    decodes = tuple(_decode_batch(step, members) for _, members in sorted(buckets.items()))
    return TorchPlan(step.write_slots, decodes, tuple(extends))


def _decode_batch(step: ForwardInput, members: list[int]) -> DecodeBatch:
    rows = torch.tensor([step.query_start[b] for b in members])
    slots = torch.nn.utils.rnn.pad_sequence([step.slots[b] for b in members], batch_first=True)
    lens = [step.kv_lens[b] for b in members]
    if min(lens) == max(lens):
        return DecodeBatch(rows, slots.reshape(-1), None)
    mask = torch.arange(max(lens)) < torch.tensor(lens).unsqueeze(1)  # [n, P]
    # pad with a slot of the same sequence: what lies in foreign slots may not be finite
    slots = torch.where(mask, slots, slots[:, :1])
    return DecodeBatch(rows, slots.reshape(-1), mask.view(len(lens), 1, 1, -1))


def _extend(start: int, stop: int, slots: Int64[Tensor, "keys"]) -> Extend:
    blocks = []
    for first in range(start, stop, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, stop)
        keys = slots.shape[0] - (stop - last)
        # query i of the block sits at position keys - queries + i and sees all up to itself
        mask = torch.ones(last - first, keys, dtype=torch.bool).tril(keys - (last - first))
        blocks.append(QueryBlock(first, last, keys, mask))
    return Extend(start, stop, slots, tuple(blocks))
