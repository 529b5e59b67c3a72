"""Which files hold a model's weights, and what their headers say. No torch here.

A safetensors file is 8 bytes of length (little endian), a JSON header of that length, then data.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from core.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class _Totals(msgspec.Struct, frozen=True):
    total_size: int = 0  # bytes of all tensors


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]  # tensor -> file name
    metadata: _Totals = _Totals()


class TensorHeader(msgspec.Struct, frozen=True):
    """What a file says of one tensor."""

    dtype: str  # as safetensors writes it: "BF16", "F32", ..
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # bytes, from the end of the header

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder: those its index names, else model.safetensors.

    Others are left alone. Raises ModelError where one is missing or the index is broken.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.DecodeError as error:
            raise ModelError(f"{index} is not a safetensors index: {error}") from error
        files = tuple(folder / name for name in sorted(set(weight_map.values())))
    else:
        files = (folder / SINGLE,)
    if absent := [path.name for path in files if not path.is_file()]:
        hint = "the index names them" if index.is_file() else f"there is no {INDEX} either"
        raise ModelError(
            f"{folder}: weights are missing: {', '.join(absent)} ({hint}); "
            "other weight formats must be converted to safetensors first"
        )
    return files


def weight_bytes(folder: Path) -> int:
    """Size of all weights on disk. Raises ModelError as ``weight_files`` does."""
    return sum(file.stat().st_size for file in weight_files(folder))


def declared_bytes(folder: Path) -> int:
    """Size of all weights: what the index says, where it does, without the files themselves.

    Raises ModelError where there is neither an index with a total nor the files.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            total = msgspec.json.decode(index.read_bytes(), type=_Index).metadata.total_size
        except msgspec.DecodeError as error:
            raise ModelError(f"{index} is not a safetensors index: {error}") from error
        if total:
            return total
    return weight_bytes(folder)


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file, without their data.

    Raises ModelError where the file is not whole: an interrupted copy shows in its size.
    """
    size = file.stat().st_size
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ModelError(f"{file} is not a whole safetensors file")
        try:
            raw = msgspec.json.decode(data.read(length), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            header = {n: msgspec.json.decode(r, type=TensorHeader) for n, r in raw.items()}
        except msgspec.DecodeError as error:
            raise ModelError(f"{file} has a damaged header: {error}") from error
    expected = 8 + length + max((t.data_offsets[1] for t in header.values()), default=0)
    if size != expected:
        raise ModelError(
            f"{file} has {size} bytes where its header needs {expected}: copy it again"
        )
    return header
