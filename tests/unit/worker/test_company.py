"""What holds of a request's output whatever it is batched with, to the last bit.

With the CPU kernels: everything, in fp32 and in bf16; logprobs are compared as floats. One limit:
a prompt chunk of an MLA model takes the form (absorbed or expanded) that suits its length, so its
bits depend on where the prompt was cut. Then only its steps being the same makes the bits so.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from core.rpc.events import Submitted
from core.wire import TokenChunk
from tests.support import tiny_models
from tests.support.real_engine import unified_engine
from tests.support.requests import request
from worker.engine import Engine
from worker.kernels.load import problem

pytestmark = pytest.mark.skipif(problem() is not None, reason="no C++ compiler here")


def answers(engine: Engine, wanted: dict[str, tuple[list[int], float]]) -> dict[str, list]:
    """(token, logprob) of every request, all submitted at once; (prompt, temperature) each."""
    out: dict[str, list] = {rid: [] for rid in wanted}
    for rid, (ids, temperature) in wanted.items():
        asked = request(rid, ids, 12, ignore_eos=True, logprobs=True, seed=len(ids))
        params = msgspec.structs.replace(asked.params, temperature=temperature)
        engine.handle(Submitted("router", msgspec.structs.replace(asked, params=params)))
    for _ in range(10_000):
        for report in engine.step(0.0).values():
            for chunk in report.chunks:
                out[chunk.rid] += pairs(chunk)
        if engine.idle:
            return out
    raise AssertionError("the engine does not come to an end")


def pairs(chunk: TokenChunk) -> list[tuple[int, float]]:
    logprobs = [entry.logprob for entry in chunk.logprobs]
    return list(zip(chunk.token_ids, logprobs, strict=True))


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def folder(request, tmp_path_factory):
    made = tiny_models.make(request.param, tmp_path_factory.mktemp(request.param))
    return made.folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), crowd=st.integers(1, 14))
def test_company_changes_nothing(folder, dtype, seed, crowd):
    """Other prompts, another chunking, other rows: the same tokens and logprobs."""
    draw = random.Random(seed)
    ids = [draw.randrange(3, 128) for _ in range(draw.randrange(5, 90))]
    alone = {"a": (ids, 0.0), "b": (ids[:-2], 1.0)}
    others = {
        f"o{i}": ([draw.randrange(3, 128) for _ in range(draw.randrange(1, 60))], draw.random())
        for i in range(crowd)
    }
    quiet = {
        rid: answers(unified_engine(folder, dtype=dtype), {rid: wanted})[rid]
        for rid, wanted in alone.items()
    }
    engine = unified_engine(folder, dtype=dtype, step_tokens=draw.randrange(16, 64))
    assert {
        rid: out for rid, out in answers(engine, others | alone).items() if rid in quiet
    } == quiet


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mla_in_company_with_the_same_cuts(dtype):
    """A trained MLA and MoE model, each prompt in one chunk."""
    draw = random.Random(1)
    ids = [draw.randrange(3, 1000) for _ in range(40)]
    engine = unified_engine(tiny_models.TINY_MOE, dtype=dtype, step_tokens=512)
    (quiet,) = answers(engine, {"a": (ids, 0.0)}).values()
    others = {f"o{i}": ([draw.randrange(3, 1000) for _ in range(20)], 0.8) for i in range(9)}
    engine = unified_engine(tiny_models.TINY_MOE, dtype=dtype, step_tokens=512)
    assert answers(engine, others | {"a": (ids, 0.0)})["a"] == quiet
