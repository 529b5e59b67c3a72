"""Load the compiled kernels into torch: then they are ``torch.ops.antiphon.*``."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from core.errors import PreflightError
from worker.kernels.build import library

logger = logging.getLogger(__name__)


@cache
def problem() -> str | None:
    """Why the kernels cannot be used here; None where they are loaded. Asked once a process.

    May take the seconds that compiling takes; logs one warning where there is a problem.
    """
    try:
        torch.ops.load_library(library())  # type: ignore[no-untyped-call] # torch's own
    except (PreflightError, OSError) as error:
        logger.warning("plain torch instead of the CPU kernels, several times slower: %s", error)
        return str(error)
    return None


def missing() -> tuple[str, ...]:
    """For a registry: what has to be installed before the kernels can be used."""
    return () if problem() is None else ("a C++ compiler (apt-get install -y g++)",)


def suits(x: Tensor) -> bool:
    """Whether the kernels are there and know this tensor's device and dtype."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and (problem() is None)
    )
