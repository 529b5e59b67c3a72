"""What models are on this machine, and the facts of one. Reads headers, never weights."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cluster import model_store
from core import env
from core.errors import ModelError
from worker.architectures import read_spec
from worker.checkpoint import read_header, weight_files
from worker.model_spec import ModelSpec

# what the layers of multi-token prediction, after the last layer, repeat of the model
_COPY = re.compile(r"model\.layers\.(\d+)\.(?:embed_tokens|shared_head\.head)\.weight")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a model folder says of itself."""

    folder: Path
    spec: ModelSpec
    parameters: int  # numbers in the weight files, each once: a copy is not counted
    weight_bytes: dict[str, int]  # by dtype as safetensors writes it, largest first


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of the catalogue."""

    source: str  # what --model takes
    folder: Path | None  # None: not fetched yet
    facts: Facts | None = None
    problem: str = ""  # why the folder cannot be served


def facts(folder: Path) -> Facts:
    """Read a model folder; raises ModelError where it cannot be served."""
    spec = read_spec(folder)
    parameters, sizes = 0, Counter[str]()
    for file in weight_files(folder):
        for name, tensor in read_header(file).items():
            if not _is_copy(name, spec):
                parameters += tensor.numbers
            sizes[tensor.dtype] += tensor.size
    return Facts(folder, spec, parameters, dict(sizes.most_common()))


def _is_copy(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor is the embedding or the head again."""
    found = _COPY.fullmatch(name)
    return found is not None and int(found[1]) >= spec.layers


def catalogue(cache: Path | None = None, hub_cache: Path | None = None) -> list[Listed]:
    """Built-in models, then those of the hub's cache by name.

    ``cache`` and ``hub_cache`` are where resolve() and huggingface_hub keep models.
    """
    cache = cache or env.cache_dir()
    listed = [_listed(name, model_store.find(name, cache=cache)) for name in model_store.BUILT_IN]
    return listed + [_listed(name, folder) for name, folder in sorted(_in_hub_cache(hub_cache))]


def _listed(source: str, folder: Path | None) -> Listed:
    if folder is None:
        return Listed(source, None)
    try:
        model_store.check_folder(folder)
        return Listed(source, folder, facts(folder))
    except ModelError as error:
        return Listed(source, folder, problem=str(error))


def _in_hub_cache(hub_cache: Path | None) -> list[tuple[str, Path]]:
    """(name, newest snapshot) of every cached model that has a config.json."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        cached = scan_cache_dir(hub_cache or constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    found = []
    for repo in cached.repos:
        snapshots = [r for r in repo.revisions if (r.snapshot_path / "config.json").is_file()]
        if repo.repo_type == "model" and snapshots:
            newest = max(snapshots, key=lambda revision: revision.last_modified)
            found.append((repo.repo_id, newest.snapshot_path))
    return found
