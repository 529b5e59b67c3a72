"""Shapes are checked in tests: the modules of ``worker`` that handle tensors run under beartype."""

import sys

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

install_import_hook(
    [
        "worker.attention",
        "worker.cache.kv_pool",
        "worker.kernels.ops",
        "worker.layers",
        "worker.models",
        "worker.moe",
        "worker.pack",
        "worker.runner",
        "worker.sampling",
    ],
    "beartype.beartype",
)

# How long an example takes says more about the machine's neighbours than about the code.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """Tests run side by side: one thread each. Modules without torch do not import it here."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
