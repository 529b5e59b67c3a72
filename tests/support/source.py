"""The source tree, for tests about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("antiphon", "router", "cluster", "worker", "disagg", "core", "bench")
GENERATED = ROOT / "router" / "rpc" / "gen"
_FOLDERS = (*PACKAGES, "tests", "docs", ".ci", "deploy", "helm")
_TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".sh", ".html", ".js", ".css", ".cpp", ""}


def modules() -> list[Path]:
    """Every Python file of the packages that a person wrote, without tests."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in found if GENERATED not in path.parents)


def documents() -> list[Path]:
    """Every Markdown page."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def texts() -> Iterator[Path]:
    """Every text file that is ours, code and documents alike."""
    for path in ROOT.iterdir():
        if path.is_file() and path.suffix in _TEXT:
            yield path
    for folder in _FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in _TEXT and "__pycache__" not in path.parts:
                yield path


def name(path: Path) -> str:
    """How a test names a file."""
    return str(path.relative_to(ROOT))
