"""The attention backends by name. Without torch: a configuration is checked where none runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.registry import Entry, Registry

if TYPE_CHECKING:
    from worker.attention.base import AttentionBackend

ATTENTION: Registry[AttentionBackend] = Registry(
    "attention backend",
    {
        "cpu": Entry(
            "worker.attention.cpu:CpuAttention",
            needs=("torch",),
            check="worker.kernels.load:missing",
        ),
        "torch": Entry("worker.attention.torch_ref:TorchAttention", needs=("torch",)),
    },
    order=("cpu", "torch"),
)
