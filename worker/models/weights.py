"""Stream safetensors into a model's final tensors; every tensor must be accounted for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from core.errors import ModelError
from worker.attention.registry import ATTENTION
from worker.checkpoint import read_header, weight_files
from worker.layers.parameter import Slot
from worker.model_spec import ModelSpec
from worker.models.assemble import assemble
from worker.models.base import Model

DISK_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LISTED = 5  # names that an error message lists


def load_model(folder: Path, spec: ModelSpec, dtype: torch.dtype, attention: str = "auto") -> Model:
    """Build the model of ``spec``, fill it from the folder's safetensors, pack it.

    Memory peaks at about one copy of the weights: tensors are copied one by one from mapped
    files to where they stay, then packed one by one. Raises ModelError for missing, unexpected
    or mis-shaped tensors and for a broken or missing file; UnknownBackend for ``attention``.
    """
    model = assemble(spec, dtype, ATTENTION.load(attention)())
    _fill(model, folder)
    model.pack()
    return model


def check_weights(folder: Path, spec: ModelSpec) -> None:
    """Raise the ModelError of ``load_model`` where names or shapes are wrong; reads headers."""
    with torch.device("meta"):  # shapes without memory
        slots = dict(assemble(spec, torch.bfloat16, ATTENTION.load("torch")()).slots())
    headers = {path: read_header(path) for path in weight_files(folder)}
    _check_names(folder, spec, set(slots), map(tuple, headers.values()))
    for path, header in headers.items():
        for name in slots.keys() & header.keys():
            _check_shape(path, name, header[name].shape, slots[name].shape)


def _fill(model: Model, folder: Path) -> None:
    """Fill every slot. The slots end here: a view that outlived this would keep a dense copy."""
    slots = dict(model.slots())
    names_by_file = {path: _names(path) for path in weight_files(folder)}
    _check_names(folder, model.spec, set(slots), names_by_file.values())
    for path, names in names_by_file.items():
        _fill_from(path, {name: slots[name] for name in names if name in slots})


def _names(path: Path) -> tuple[str, ...]:
    try:
        with safe_open(path, framework="pt") as file:
            return tuple(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def _check_names(
    folder: Path, spec: ModelSpec, expected: set[str], found: Iterable[tuple[str, ...]]
) -> None:
    names = [name for file in found for name in file]
    if missing := expected - set(names):
        raise ModelError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    if unexpected := {n for n in names if n not in expected and not _is_surplus(n, spec)}:
        raise ModelError(
            f"{folder}: {len(unexpected)} tensors belong to no part of {spec.architecture} as "
            f"config.json describes it: {_some(unexpected)}"
        )
    if twice := {n for n, count in Counter(names).items() if count > 1}:
        raise ModelError(f"{folder}: {len(twice)} tensors are in two files: {_some(twice)}")


def _is_surplus(name: str, spec: ModelSpec) -> bool:
    """Tensors that checkpoints may hold and this model does not need."""
    if name == "lm_head.weight":
        return spec.tie_embeddings
    if name.endswith("rotary_emb.inv_freq"):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= spec.layers  # multi-token prediction


def _fill_from(path: Path, slots: dict[str, Slot]) -> None:
    with safe_open(path, framework="pt") as file:
        for name, slot in slots.items():
            tensor: torch.Tensor = file.get_tensor(name)
            _check_shape(path, name, tuple(tensor.shape), slot.shape)
            if tensor.dtype not in DISK_DTYPES:
                raise ModelError(
                    f"{path}: tensor {name} is {tensor.dtype}; supported: {DISK_DTYPES}"
                )
            slot.fill(tensor)


def _check_shape(path: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ModelError(
            f"{path}: tensor {name} has shape {list(found)}, but config.json "
            f"asks for {list(wanted)}"
        )


def _some(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return ", ".join(listed[:LISTED]) + more
