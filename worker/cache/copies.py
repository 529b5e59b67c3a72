"""SlotCopy: KV that a step copies before it computes."""

from __future__ import annotations

from dataclasses import dataclass

from core.wire import Int32Array


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """What lies in each slot of ``source`` goes to the same place in ``target``, in every layer.

    No slot of one step's copies is a source and a target, or a target twice.
    """

    source: Int32Array
    target: Int32Array
