"""One trace id from the caller through the router, the prefill rank, the transfer and decode."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from core.config import TracingConfig
from core.tracing.file import read
from core.tracing.span import SpanRecord
from tests.support.eventually import eventually, run_tidy
from tests.support.pd_hosts import pd_hosts
from tests.support.spans import CALLER, check_tree, named
from tests.support.tiny_models import TINY_MOE

WHOLE = {"text_completion", "tokenise", "attempt", "dispatch", "prefill", "transfer.send",
         "transfer.receive", "decode"}  # fmt: skip


def prompt(start: int, count: int = 40) -> list[int]:
    return [100 + (start + 7 * i) % 3000 for i in range(count)]


def of_trace(path: Path, trace_id: str) -> list[SpanRecord]:
    return [span for span in read(path.read_text()) if span.trace_id == trace_id]


def names(spans: list[SpanRecord]) -> set[str]:
    return {span.name.split()[0] for span in spans}


def test_the_spans_of_one_request_come_from_three_processes_and_make_one_tree(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "spans.jsonl"

    async def main() -> None:
        tracing = TracingConfig(file=str(path))
        async with pd_hosts(TINY_MOE, local_prefill="off", tracing=tracing) as pair:
            body = {"prompt": prompt(0), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            headers = {"traceparent": CALLER}
            answer = await pair.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            await eventually(lambda: names(of_trace(path, "ab" * 16)) == WHOLE)
            rids.append(answer.json()["id"])

    rids: list[str] = []
    run_tidy(main)
    spans = of_trace(path, "ab" * 16)
    check_tree(spans)
    assert len(spans) == len(WHOLE)
    request, attempt = named(spans, "text_completion"), named(spans, "attempt")
    assert request.parent_id == "cd" * 8
    assert attempt.parent_id == named(spans, "tokenise").parent_id == request.span_id
    legs = [named(spans, n) for n in ("dispatch", "prefill", "transfer.send", "transfer.receive")]
    assert {span.parent_id for span in [*legs, named(spans, "decode")]} == {attempt.span_id}

    assert request.component == "router"
    assert named(spans, "prefill").component == "prefill/0/0"
    assert named(spans, "transfer.send").component == "prefill/0/0"
    assert named(spans, "transfer.receive").component == "decode/0/0"
    assert named(spans, "decode").component == "decode/0/0"

    received, decode, prefill = (named(spans, n) for n in ("transfer.receive", "decode", "prefill"))
    assert request.start_s <= prefill.start_s <= prefill.end_s <= decode.end_s <= request.end_s
    assert received.end_s == decode.start_s
    assert prefill.end_s <= received.end_s, "the KV is there when the first token is sampled"
    assert not any(span.error for span in spans)

    sent = named(spans, "transfer.send").attributes
    assert sent["antiphon.transfer.bytes"] == received.attributes["antiphon.transfer.bytes"] > 0
    assert request.attributes["gen_ai.usage.input_tokens"] == 40
    assert request.attributes["gen_ai.usage.output_tokens"] == 6
    assert prefill.attributes["gen_ai.usage.input_tokens"] == 40
    assert decode.attributes["gen_ai.usage.output_tokens"] == 5
    assert request.attributes["gen_ai.response.id"] == rids[0]
    assert prefill.attributes["antiphon.rid"] == f"{rids[0]}.0"


def test_a_caller_who_leaves_ends_every_span_with_a_reason(tmp_path):
    path = tmp_path / "spans.jsonl"

    async def main() -> None:
        tracing = TracingConfig(file=str(path))
        async with pd_hosts(TINY_MOE, local_prefill="off", tracing=tracing) as pair:
            body = {"prompt": prompt(3), "max_tokens": 1900, "ignore_eos": True}
            headers = {"traceparent": CALLER}
            asked = pair.http.post("/v1/completions", json=body, headers=headers)
            task = asyncio.create_task(asked)
            live = pair.parts.door
            await eventually(lambda: live.running and task_has_tokens(pair))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await pair.at_rest()
            await eventually(lambda: "decode" in names(of_trace(path, "ab" * 16)))

    run_tidy(main)
    spans = of_trace(path, "ab" * 16)
    check_tree(spans)
    assert names(spans) == WHOLE
    assert named(spans, "text_completion").error == "the caller went away"
    assert "went away" in named(spans, "attempt").error
    assert named(spans, "decode").error == "stopped by the router"
    over = ("tokenise", "dispatch", "prefill", "transfer.send", "transfer.receive")
    assert not any(named(spans, name).error for name in over)


def task_has_tokens(pair) -> bool:
    return any(r.client.load.running_requests for _, r in pair.parts.replicas.members() if r)


def test_a_stop_string_is_no_failure_of_anybody(tmp_path):
    path = tmp_path / "spans.jsonl"

    async def main() -> None:
        tracing = TracingConfig(file=str(path))
        async with pd_hosts(TINY_MOE, local_prefill="off", tracing=tracing) as pair:
            body = {"prompt": prompt(5), "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            text = (await pair.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            body |= {"stop": [text[8:12]], "max_tokens": 1000}
            answer = await pair.http.post(
                "/v1/completions", json=body, headers={"traceparent": CALLER}
            )
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            await pair.at_rest()
            await eventually(lambda: names(of_trace(path, "ab" * 16)) == WHOLE)

    run_tidy(main)
    spans = of_trace(path, "ab" * 16)
    assert [span.error for span in spans if span.error] == []
    assert named(spans, "decode").attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_records_of_router_and_ranks_carry_the_trace_id(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    async def main() -> None:
        tracing = TracingConfig(file=str(tmp_path / "spans"))
        async with pd_hosts(TINY_MOE, local_prefill="off", tracing=tracing) as pair:
            body = {"prompt": prompt(9), "max_tokens": 4, "ignore_eos": True}
            await pair.http.post("/v1/completions", json=body, headers={"traceparent": CALLER})
            await pair.at_rest()

    run_tidy(main)
    about = [r for r in caplog.records if getattr(r, "trace_id", "") == "ab" * 16]
    assert {r.name for r in about} >= {
        "router.live",
        "router.frontdoor",
        "worker.engine",
        "worker.streams",
        "worker.roles.decode",
        "disagg.sender",
    }
    rids = {getattr(r, "rid", None) for r in about}
    assert len(rids) == 2, "the request's, and its attempt's"
