"""What all layers of a step share in the CPU backend: its sequences, and the keys they share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from worker.pack import ForwardInput

Span = tuple[int, int, int, int]  # first query, end of queries, first slot, end of slots
Tree = tuple[Int64[Tensor, "B"], Int64[Tensor, "nodes 4"]]


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one call of the kernel. Where they have the same slots, keys and values are
    read once for all of them; that changes no bit of a result.
    """

    spans: Int64[Tensor, "B 4"]
    slots: Int64[Tensor, "S"]  # of all sequences, one after the other
    share: bool
    trees: dict[int, Tree] = field(default_factory=dict)  # by head size

    @classmethod
    def of(cls, spans: list[Span], slots: Int64[Tensor, "S"], share: bool = True) -> Sequences:
        return cls(torch.tensor(spans, dtype=torch.int64).view(-1, 4), slots, share)

    def attend(
        self,
        q: Float[Tensor, "n heads dim"],
        k: Float[Tensor, "slots kv_heads dim"],
        v: Float[Tensor, "slots kv_heads v_dim"],
        scale: float,
    ) -> Float[Tensor, "n heads v_dim"]:
        """Causal attention of every query over the keys of its sequence."""
        order, nodes = self.tree(q.shape[2])
        out: Tensor = torch.ops.antiphon.attention(
            q, k, v, self.spans, self.slots, scale, order, nodes
        )
        return out

    def tree(self, dim: int) -> Tree | tuple[None, None]:
        """Which sequences share which blocks of keys, for heads of ``dim`` numbers; found once."""
        if not self.share or len(self.spans) == 1:
            return None, None
        if dim not in self.trees:
            self.trees[dim] = torch.ops.antiphon.prefix_tree(self.spans, self.slots, dim)
        return self.trees[dim]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Shared by all layers of one step; what depends on a layer's shapes is found by the first."""

    write_slots: Int64[Tensor, "T"]
    sequences: Sequences
    prompts: tuple[Span, ...]  # the sequences with several queries
    rests: dict[tuple[Span, ...], tuple[Int64[Tensor, "n"], Sequences]] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, step: ForwardInput, share: bool) -> CpuPlan:
        ends = [0]
        for kv_len in step.kv_lens:
            ends.append(ends[-1] + kv_len)
        starts = step.query_start
        spans = list(zip(starts, starts[1:], ends, ends[1:], strict=False))
        slots = torch.cat(step.slots) if step.slots else torch.empty(0, dtype=torch.int64)
        return cls(
            step.write_slots.contiguous(),
            Sequences.of(spans, slots, share),
            tuple(span for span in spans if span[1] - span[0] > 1),
        )

    def keys(self, dim: int) -> tuple[Tensor | None, ...]:
        """The step's sequences and what they share, as a recording takes them."""
        sequences = self.sequences
        return sequences.spans, sequences.slots, *sequences.tree(dim)

    def without(self, some: tuple[Span, ...]) -> tuple[Int64[Tensor, "n"], Sequences]:
        """The sequences without ``some``, over their tokens alone, and these tokens."""
        if some not in self.rests:
            rows: list[int] = []
            spans: list[Span] = []
            for first, stop, start, end in self.sequences.spans.tolist():
                if (first, stop, start, end) not in some:
                    spans.append((len(rows), len(rows) + stop - first, start, end))
                    rows += range(first, stop)
            rest = Sequences.of(spans, self.sequences.slots, self.sequences.share)
            self.rests[some] = torch.tensor(rows, dtype=torch.int64), rest
        return self.rests[some]
