"""Assemble a model from its spec: which attention and which MLP each layer has."""

from __future__ import annotations

import torch

from worker.attention.base import AttentionBackend
from worker.layers.mlp import GatedMlp
from worker.model_spec import ModelSpec
from worker.models.decoder import Attention, Decoder, Layer, Mlp
from worker.models.gqa import GroupedQueryAttention
from worker.models.mla import LatentAttention
from worker.moe.layer import MoeLayer


def assemble(spec: ModelSpec, dtype: torch.dtype, backend: AttentionBackend) -> Decoder:
    """Allocate the final tensors of a model, to be filled through its slots."""
    layers = [
        Layer(spec, _attention(spec, index, backend, dtype), _mlp(spec, index, dtype), dtype)
        for index in range(spec.layers)
    ]
    return Decoder(spec, layers, backend, dtype)


def _attention(
    spec: ModelSpec, index: int, backend: AttentionBackend, dtype: torch.dtype
) -> Attention:
    if spec.mla is not None:
        return LatentAttention(spec, spec.mla, index, backend, dtype)
    return GroupedQueryAttention(spec, index, backend, dtype)


def _mlp(spec: ModelSpec, index: int, dtype: torch.dtype) -> Mlp:
    if spec.moe is not None and spec.is_moe_layer(index):
        return MoeLayer(spec.moe, spec.hidden, dtype)
    return GatedMlp(spec.hidden, spec.intermediate, dtype, bias=spec.mlp_bias)
