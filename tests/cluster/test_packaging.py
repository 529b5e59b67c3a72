"""What `pip install antiphon` gives: the wheel, the sdist, and an editable install."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

from tests.support import source

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROBE = "import core, core.presets; print(core.__file__, *core.presets.names())"

SHIPPED = """
from cluster import model_store
from core.errors import ModelError

try:
    model_store.resolve("tiny-moe", print)
except ModelError as error:
    print(error)
"""


def run(*command: object, cwd) -> str:
    """Run outside the checkout, so that only what is installed can be imported."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # noqa: TID251 - a child's
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, source.ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """bin/ of an empty virtual environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder / "bin"


def test_the_wheel_holds_the_packages_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == set(source.PACKAGES)
    assert "core/preset_files/cpu.yaml" in names
    shipped = {name for name in names if name.endswith(".py")}
    written = {*source.modules(), *source.GENERATED.glob("*.py")}
    assert shipped == {source.name(path) for path in written}
    assert any(name.endswith(".cpp") for name in names), "the kernels are built where they run"


def test_the_sdist_holds_what_the_wheel_is_made_of(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "core/preset_files/cpu.yaml"} <= names


def test_the_wheel_works_with_its_hard_dependencies_alone(built, environment, tmp_path):
    (wheel,) = built.glob("*.whl")
    run(environment / "python", "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    file, *presets = run(environment / "python", "-c", PROBE, cwd=tmp_path).split()
    assert not file.startswith(f"{source.ROOT}/core")
    assert {"cpu", "cpu-unified"} <= set(presets)
    assert "serve" in run(environment / "antiphon", "--help", cwd=tmp_path)
    assert "clone the repository" in run(environment / "python", "-c", SHIPPED, cwd=tmp_path)


def test_an_editable_install_is_the_checkout(environment, tmp_path):
    pip = (environment / "python", "-m", "pip", "install", "--quiet")
    run(*pip, "--editable", source.ROOT, cwd=tmp_path)
    file, *presets = run(environment / "python", "-c", PROBE, cwd=tmp_path).split()
    assert file == str(source.ROOT / "core" / "__init__.py")
    assert "cpu" in presets
