"""Tiny checkpoints with transformers' reference, and our model of each, loaded once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.support import tiny_models
from worker.architectures import read_spec
from worker.attention.registry import ATTENTION
from worker.cache.kv_pool import KVPool
from worker.model_spec import ModelSpec
from worker.models.base import Model
from worker.models.weights import load_model


@dataclass(frozen=True)
class Case:
    checkpoint: tiny_models.Checkpoint
    spec: ModelSpec
    model: Model

    def pool(self, tokens: int) -> KVPool:
        return KVPool(self.spec, tokens, torch.float32)

    def ids(self, count: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.spec.vocab, (count,), generator=generator).tolist()


# every architecture with the backend that "auto" takes; the trained model with each
CASES = [(name, "auto") for name in tiny_models.NAMES]
CASES += [("trained", backend) for backend in ATTENTION.usable()]


@pytest.fixture(scope="session", params=CASES, ids="-".join)
def case(request, tmp_path_factory):
    """Every architecture variant, in fp32."""
    torch.set_num_threads(1)
    name, attention = request.param
    if name == "trained":
        checkpoint = tiny_models.trained()
    else:
        checkpoint = tiny_models.make(name, tmp_path_factory.mktemp(name))
    spec = read_spec(checkpoint.folder)
    return Case(checkpoint, spec, load_model(checkpoint.folder, spec, torch.float32, attention))
