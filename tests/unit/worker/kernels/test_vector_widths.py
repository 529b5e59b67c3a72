"""The kernels compiled for narrower vectors than this processor has: the same answers.

LANES is 4 for plain x86-64, as on AArch64, and 8 with AVX2.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from worker.kernels import build
from worker.kernels.load import problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(problem() is not None, reason="no C++ compiler here"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors to pretend"),
]

CHECK = """
import sys, torch
torch.ops.load_library(sys.argv[1])
kernels = torch.ops.antiphon
torch.manual_seed(0)
for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
    weight = torch.randn(100, 70).to(dtype)
    packed = kernels.pack_linear(weight)
    for rows in range(1, 28):
        x = torch.randn(rows, 70).to(dtype)
        right = x.float() @ weight.float().T
        assert torch.allclose(kernels.linear(x, packed, 100, None, True), right, atol=1e-3), rows
    keys, values = (torch.randn(600, 2, width).to(dtype) for width in (32, 24))
    for queries in (1, 2, 3, 7, 40):
        q = torch.randn(queries, 6, 32).to(dtype)
        out = kernels.attention(q, keys, values, torch.tensor([[0, queries, 0, 530]]),
                                torch.arange(530), 0.2, None, None)
        k, v = (t[:530].float().repeat_interleave(3, 1) for t in (keys, values))
        hidden = torch.arange(530)[None] > (530 - queries + torch.arange(queries))[:, None]
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * 0.2
        right = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -1e9).softmax(-1), v)
        assert torch.allclose(out.float(), right, atol=near), queries
    rows = torch.randn(5, 70).to(dtype)
    norm = kernels.rms_norm(rows, torch.ones(70, dtype=dtype), 1e-6).float()
    right = torch.nn.functional.rms_norm(rows.float(), (70,), eps=1e-6)
    assert torch.allclose(norm, right, atol=near)
    gate, up = (right @ weight.float().T / 8).chunk(2, 1)
    gated = kernels.pack_linear(weight / 8, True)
    ones = torch.ones(70, dtype=dtype)
    ours = kernels.linear(rows, gated, 100, None, False, ones, 1e-6, True).float()
    assert torch.allclose(ours, torch.nn.functional.silu(gate) * up, rtol=near, atol=2 * near)
assert kernels.argmax(torch.tensor([[1.0, 3.0, 2.0] * 9])).tolist() == [1]
"""


@pytest.mark.parametrize("architecture", ["x86-64", "haswell"])
def test_narrow_vectors_give_the_right_numbers(architecture, tmp_path):
    if architecture == "haswell" and " avx2" not in Path("/proc/cpuinfo").read_text("utf-8"):
        pytest.skip("this processor has no AVX2")
    torch_root = Path(torch.__file__).parent
    flags = [flag for flag in build.FLAGS if not flag.startswith("-O")]
    flags += ["-O1", f"-march={architecture}", "-isystem", str(torch_root / "include")]
    sources = sorted(build.SOURCES.glob("*.cpp"))
    objects = [str(tmp_path / f"{source.stem}.o") for source in sources]
    commands = [
        ["g++", *flags, "-c", str(source), "-o", to]
        for source, to in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    library = str(tmp_path / "narrow.so")
    link = ["g++", "-shared", "-fopenmp", *objects, "-o", library, f"-L{torch_root / 'lib'}"]
    subprocess.run([*link, "-ltorch_cpu", "-lc10"], check=True)
    subprocess.run([sys.executable, "-c", CHECK, library], check=True, timeout=120)
