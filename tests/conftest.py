"""Shapes are checked in tests: the modules of ``worker`` that handle tensors run under beartype."""

from jaxtyping import install_import_hook

install_import_hook(
    [
        "worker.attention",
        "worker.cache.kv_pool",
        "worker.layers",
        "worker.models",
        "worker.moe",
        "worker.pack",
        "worker.runner",
        "worker.sampling",
    ],
    "beartype.beartype",
)
