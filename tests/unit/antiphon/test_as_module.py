"""``python -m antiphon`` is the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["antiphon", "antiphon.cli"])
def test_a_module_is_a_command(module):
    command = [sys.executable, "-m", module]
    done = subprocess.run([*command, "presets"], capture_output=True, text=True, check=True)
    assert "cpu-unified" in done.stdout.split()
    wrong = subprocess.run([*command, "serve", "--nonsense"], capture_output=True, check=False)
    assert wrong.returncode == 2
