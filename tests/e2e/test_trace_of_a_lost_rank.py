"""A rank that is killed in the middle of an answer: its trace says so, and who carried on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from core.tracing.file import read
from core.tracing.span import SpanRecord
from tests.support.eventually import eventually
from tests.support.served import serving
from tests.support.spans import CALLER

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

TOKENS = 1500


def of_attempt(spans: list[SpanRecord], attempt: SpanRecord) -> set[str]:
    return {span.name for span in spans if span.parent_id == attempt.span_id}


async def answered(url: str, kill: int) -> str:
    """The finish reason of a long answer, during which the process ``kill`` is killed."""
    body = {"prompt": [100 + i for i in range(40)], "max_tokens": TOKENS, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0}
    finish, lines = "", 0
    async with (
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
        client.stream(
            "POST", "/v1/completions", json=body, headers={"traceparent": CALLER}
        ) as answer,
    ):
        async for line in answer.aiter_lines():
            lines += 1
            if lines == 40:
                os.kill(kill, signal.SIGKILL)
            if '"finish_reason":"' in line:
                finish = line.split('"finish_reason":"')[1].split('"')[0]
    return finish


def test_a_killed_decode_rank_ends_its_attempt_and_a_second_one_carries_on(tmp_path: Path):
    path = tmp_path / "spans.jsonl"
    words = (
        "cluster.runtime=process",
        "model.dtype=float32",
        "disagg.local_prefill=off",
        f"tracing.file={path}",
    )

    def seen(name: str) -> bool:
        return any(s.name == name and s.trace_id == "ab" * 16 for s in read(path.read_text()))

    with serving("cpu", "--model", "tiny-moe", *words) as served:
        victim = served.rank("decode")["info"]["pid"]
        assert asyncio.run(answered(served.url, victim)) == "length"
        asyncio.run(eventually(lambda: seen("decode")))
    spans = [s for s in read(path.read_text()) if s.trace_id == "ab" * 16]
    lost, carried = sorted((s for s in spans if s.name == "attempt"), key=lambda s: s.start_s)
    assert "decode/0/0" in lost.error
    assert [event.name for event in lost.events] == ["first_token", "reroute"]
    assert carried.error == ""
    assert carried.attributes["antiphon.reused.output_tokens"] > 0
    # what the killed process knew of its part is gone with it
    assert of_attempt(spans, lost) == {"dispatch", "prefill", "transfer.send"}
    assert of_attempt(spans, carried) >= {"dispatch", "prefill", "transfer.send", "decode"}
    (request,) = (s for s in spans if s.parent_id == "cd" * 8)
    assert {lost.parent_id, carried.parent_id} == {request.span_id}
    assert request.error == ""
    assert request.attributes["gen_ai.usage.output_tokens"] == TOKENS
