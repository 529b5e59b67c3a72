"""Slot: where one tensor of a checkpoint goes inside a model's final tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """A view into a final tensor, the shape its content has on disk, and a reordering of rows."""

    view: Tensor
    rows: Tensor | None = None  # row i of the view is row rows[i] on disk

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape)

    def fill(self, disk: Tensor) -> None:
        """Copy a tensor of the same shape in, converting its dtype."""
        self.view.copy_(disk if self.rows is None else disk[self.rows])


Slots = Iterator[tuple[str, Slot]]


def neighbour_rows(heads: int, plain: int, rotary: int) -> Tensor:
    """Row order that turns rotary halves into neighbouring pairs.

    A head has ``plain`` rows, then ``rotary`` rows; on disk the rotary partners are ``rotary/2``
    apart (x0 x1 .. | y0 y1 ..), here they become neighbours (x0 y0 x1 y1 ..). Queries and keys
    are reordered alike, so that their products do not change.
    """
    half = rotary // 2
    pairs = torch.arange(rotary).view(2, half).t().reshape(-1)
    head = torch.cat((torch.arange(plain), plain + pairs))
    return (torch.arange(heads).unsqueeze(1) * (plain + rotary) + head).reshape(-1)
