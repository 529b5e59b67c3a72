"""Where the compiled kernels lie, who compiles them, and what happens where nobody can."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from core.clock import RealClock
from core.errors import PreflightError
from worker.attention.registry import ATTENTION
from worker.kernels import build, load


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache, and sources that compile in no time."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path


@pytest.fixture
def compiler(folder, monkeypatch):
    """A stand-in that writes its output file, and counts."""
    program, log = folder / "compiler", folder / "calls"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(build, "COMPILERS", (str(program),))
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_the_second_call_takes_the_cache(compiler):
    first = build.library()
    assert first.read_text() == "built\n"
    calls = compiler()
    assert len(calls) == 2  # one source, one link
    assert build.library() == first
    assert compiler() == calls


def test_another_source_is_another_library(folder, compiler):
    first = build.library()
    (folder / "sources" / "one.h").write_text("// changed\n")
    assert build.library() != first
    assert first.exists()


def test_ranks_that_start_together_compile_once(compiler):
    threads = [threading.Thread(target=build.library) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler()) == 2


def test_nothing_half_done_stays(folder, compiler):
    target = build.library()
    assert sorted(path.suffix for path in target.parent.iterdir()) == [".lock", ".so"]


def test_what_a_build_that_was_killed_left_is_removed_by_the_next(folder, compiler):
    target = build.library()
    target.unlink()
    (target.parent / "tmpkilled").mkdir()
    (target.parent / "tmpkilled" / "one.o").write_text("half")
    assert build.library() == target
    assert sorted(path.suffix for path in target.parent.iterdir()) == [".lock", ".so"]


def test_a_library_that_was_long_unused_makes_room_for_a_new_one(folder, compiler):
    def other(text: str) -> Path:
        (folder / "sources" / "one.h").write_text(text)
        return build.library()

    def age(path: Path, seconds: float) -> None:
        then = RealClock().epoch() - seconds
        os.utime(path, (then, then))

    unused, used = other("// 1\n"), other("// 2\n")
    for library in (unused, used):
        age(library, build.KEPT_S + 60)
    killed = unused.parent.with_name("killed")  # a build that never came to its end
    killed.mkdir()
    age(killed, build.KEPT_S + 60)
    assert other("// 2\n") == used  # asked for again
    fresh = other("// 3\n")
    assert {path.name for path in fresh.parent.parent.iterdir()} == {
        used.parent.name, fresh.parent.name
    }  # fmt: skip


def test_a_filled_cache_needs_no_compiler(compiler, monkeypatch):
    target = build.library()
    monkeypatch.setattr(build, "COMPILERS", ())
    assert build.library() == target


def test_no_compiler_names_the_fix(folder, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ())
    with pytest.raises(PreflightError, match=r"apt-get install -y g\+\+"):
        build.library()


def test_a_compilers_complaint_is_shown(folder, monkeypatch):
    program = folder / "compiler"
    program.write_text('#!/bin/sh\necho "one.cpp:1: strange" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(program),))
    with pytest.raises(
        PreflightError, match=r"cannot compile the CPU kernels:\none.cpp:1: strange"
    ):
        build.library()


def test_without_kernels_auto_is_torch_and_says_so_once(folder, monkeypatch, caplog):
    monkeypatch.setattr(build, "COMPILERS", ())
    load.problem.cache_clear()
    try:
        assert ATTENTION.resolve("auto") == "torch"
        assert ATTENTION.usable() == ("torch",)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no C++ compiler" in caplog.text
    finally:
        load.problem.cache_clear()
