"""Stack: a decoder's layers one after the other; short steps as one call, once they are recorded.

A decode step is several hundred kernels of 10 to 100 µs, and the Python around each costs about
as much as the shortest. So the first step of a size is recorded while it runs, and steps of that
size are replayed after that, whatever sequences they have: what CUDA graphs are on a GPU. It is
the same kernels in the same order, so results are the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from worker.attention.cpu_plan import CpuPlan
from worker.cache.kv_pool import KVPool
from worker.models.context import Context

logger = logging.getLogger(__name__)

MOST_TOKENS = 64  # of a recorded step: in longer ones kernels take so long that Python is nothing

Layer = Callable[[Float[Tensor, "T hidden"], Context], Float[Tensor, "T hidden"]]


class UnrecordableError(Exception):
    """A layer does something that a replay would leave out."""


class Stack:
    """Layers that add to the residual stream in place."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._recordings: dict[int, Any] = {}  # by number of tokens; opaque: the kernels' Recording
        self._pool: KVPool | None = None  # the one they were recorded with
        self._recordable = True

    def __call__(self, x: Float[Tensor, "T hidden"], context: Context) -> Float[Tensor, "T hidden"]:
        """``x`` after all layers. It may be overwritten by the next call of the same size."""
        plan = context.plan
        if not (self._recordable and isinstance(plan, CpuPlan) and 0 < len(x) <= MOST_TOKENS):
            return self._run(x, context)
        if self._pool is not context.pool:
            self._pool = context.pool
            self._recordings.clear()
        recording = self._recordings.get(len(x))
        if recording is not None:
            out: Tensor = recording.run(
                x, context.rotations, plan.write_slots, *plan.keys(recording.head_dim())
            )
            return out
        try:
            return self._record(x, context, plan)
        except UnrecordableError as reason:
            logger.debug("steps are not recorded: %s", reason)
            self._recordable = False
            return self._run(x, context)

    def to_ends(
        self, x: Float[Tensor, "T hidden"], context: Context, last: Context
    ) -> Float[Tensor, "A hidden"]:
        """``x`` after all layers, of the tokens that ask in ``last``, which the last layer gets.

        That saves a prompt most of a layer: only its keys and values are needed. Not recorded.
        """
        for layer in self._layers[:-1]:
            x = layer(x, context)
        return self._layers[-1](x, last)

    def _run(self, x: Float[Tensor, "T hidden"], context: Context) -> Float[Tensor, "T hidden"]:
        for layer in self._layers:
            x = layer(x, context)
        return x

    def _record(
        self, x: Float[Tensor, "T hidden"], context: Context, plan: CpuPlan
    ) -> Float[Tensor, "T hidden"]:
        recording = torch.classes.antiphon.Recording(x, context.rotations, plan.write_slots)
        own = replace(
            context,
            plan=replace(plan, write_slots=recording.write_slots()),
            rotations=recording.rotations(),
        )
        with _recorded(recording):
            out = self._run(recording.x(), own)
        self._recordings[len(x)] = recording
        return out


@contextmanager
def _recorded(recording: Any) -> Iterator[None]:
    recording.begin()
    try:
        with _KernelsOnly():  # type: ignore[no-untyped-call] # torch's own
            yield
    finally:
        recording.end()


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own
    """Refuses whatever computes, or moves numbers, without the recorder knowing of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it torch would import its compiler, 800 modules, at the first step."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace != "antiphon" and not _is_view(func):
            raise UnrecordableError(f"{func} is not one of the recorded kernels")
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Whether an operator only looks at its argument in another way."""
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias and not alias.is_write for alias in returned)
