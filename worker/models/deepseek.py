"""DeepSeek V2, V3 and R1: multi-head latent attention with dense and mixture-of-experts layers."""

from __future__ import annotations

import torch

from core.errors import ModelError
from worker.attention.base import AttentionBackend
from worker.layers.mlp import GatedMlp
from worker.model_spec import ModelSpec
from worker.models.decoder import Decoder, Layer, Mlp
from worker.models.mla import LatentAttention
from worker.moe.layer import MoeLayer


def build(spec: ModelSpec, dtype: torch.dtype, backend: AttentionBackend) -> Decoder:
    """Allocate a DeepSeek model, to be filled through its slots."""
    if spec.mla is None:
        raise ModelError(f"{spec.architecture} needs latent attention (kv_lora_rank)")
    layers = [
        Layer(
            spec,
            LatentAttention(spec, spec.mla, index, backend, dtype),
            _mlp(spec, index, dtype),
            dtype,
        )
        for index in range(spec.layers)
    ]
    return Decoder(spec, layers, backend, dtype)


def _mlp(spec: ModelSpec, index: int, dtype: torch.dtype) -> Mlp:
    if spec.moe is not None and spec.is_moe_layer(index):
        return MoeLayer(spec.moe, spec.hidden, dtype)
    return GatedMlp(spec.hidden, spec.intermediate, dtype)
