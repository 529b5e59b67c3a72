"""The team of threads: an item that throws ends the process, on the caller's thread as on others.

Otherwise helpers would go on with what the unwound caller had on its stack.
"""

from __future__ import annotations

import shutil
import signal
import subprocess

import pytest

from worker.kernels.build import COMPILERS, SOURCES

PROGRAM = """
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include "team.h"

int main() {
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> thrown{false};
  try {
    antiphon::parallel_for(2, 2, [&](int64_t) {
      if (std::this_thread::get_id() == caller) {
        thrown = true;
        throw std::runtime_error("as the test wanted");
      }
      while (!thrown) std::this_thread::yield();
    });
  } catch (const std::runtime_error&) {
    std::puts("the caller went on");
  }
}
"""

COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_an_item_that_throws_in_the_caller_ends_the_process(tmp_path):
    (tmp_path / "main.cpp").write_text(PROGRAM)
    program = tmp_path / "main"
    sources = [str(tmp_path / "main.cpp"), str(SOURCES / "team.cpp")]
    flags = ["-std=c++20", "-pthread", "-I", str(SOURCES)]
    subprocess.run([COMPILER, *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "")
    assert "as the test wanted" in done.stderr
