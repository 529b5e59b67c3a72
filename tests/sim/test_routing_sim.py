"""Routing policies over simulated engines: a tiny trace made here, all in virtual time."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest

from bench.router_quality import main, make_policy, summary
from bench.sim.engine import EngineModel, SimEngine, SimRequest
from bench.sim.fleet import Replay, SimRank
from bench.sim.traces import TraceRequest, text
from core.clock import VirtualClock

MODEL = EngineModel(capacity=20_000)


def conversations(seed: int = 1, count: int = 60) -> list[TraceRequest]:
    """Chats of three turns over four system prompts, faster than one rank can serve."""
    draw, trace, at = Random(seed), [], 0.0
    for chat in range(count):
        at += draw.expovariate(8.0)
        for turn in range(3):
            number = 3 * chat + turn
            said = (("user", ((10_000 + number, draw.randint(50, 400)),)),)
            if turn == 0:
                said = (("system", ((draw.randrange(4), 1500),)), *said)
            parent = number - 1 if turn else None
            pause = draw.expovariate(0.5) if turn else at
            trace.append(TraceRequest(id=number, parent=parent, t=pause, msgs=said, out=60))
    return trace


def replay(policy: str, trace: list[TraceRequest]):
    clock = VirtualClock()
    ranks = [SimRank(number, MODEL) for number in range(4)]
    served = Replay(trace, ranks, make_policy(policy, clock), clock).run()
    assert len(served) == len(trace)
    assert all(r.outstanding_tokens == r.outstanding_requests == 0 for r in ranks)
    return summary("tiny", policy, served)


def test_cache_aware_beats_taking_turns():
    trace = conversations()
    ours, turns = replay("cache_aware", trace), replay("round_robin", trace)
    assert ours.hit_rate > turns.hit_rate + 0.1
    assert ours.ttft_mean_s < 0.7 * turns.ttft_mean_s


@pytest.mark.parametrize("policy", ["least_load", "least_requests", "threshold", "block_cost"])
def test_every_policy_serves_the_whole_trace(policy):
    assert replay(policy, conversations(count=20)).ttft_mean_s > 0


def test_an_engine_takes_the_time_its_model_says():
    engine, seen = SimEngine(MODEL), []
    prompt, output = text(1, 1000), text(2, 11)
    engine.submit(SimRequest(prompt, output, seen.append, seen.append), 5.0)
    engine.advance(100.0)
    prefill_step = MODEL.step_s + MODEL.step_s_per_token * 1000
    prefill_step += MODEL.chunk * MODEL.seconds_per_token
    first = 5.0 + MODEL.work(1000, 0) / MODEL.chunk * prefill_step
    decode_step = MODEL.step_s + MODEL.step_s_per_request + MODEL.step_s_per_token * 1000
    assert seen == pytest.approx([first, first + 10 * decode_step])
    assert engine.idle


def test_an_engine_reuses_prefixes_and_evicts_at_its_capacity():
    engine = SimEngine(EngineModel(capacity=3000))

    def serve(prompt: np.ndarray) -> int:
        request = SimRequest(prompt, text(99, 5), lambda at: None, lambda at: None)
        engine.submit(request, engine.now)
        engine.advance(engine.now + 100.0)
        return request.cached

    assert [serve(text(1, 1000)), serve(text(1, 1000)), serve(text(2, 1000))] == [0, 999, 0]
    serve(text(3, 1500))
    assert engine.tree.tokens <= 3000
    assert serve(text(2, 1000)) > 900
    assert serve(text(1, 1000)) < 900


def test_without_traces_it_says_so(capsys, tmp_path):
    assert main([str(tmp_path)]) == 0
    assert "skipped: no traces" in capsys.readouterr().out


def test_a_folder_of_traces_makes_a_table(capsys, tmp_path):
    lines = [msgspec.json.encode(request).decode() for request in conversations(count=5)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    assert main([str(tmp_path), "--policy", "cache_aware", "round_robin"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in shown[2:]] == [
        ["| chat", "cache_aware"],
        ["| chat", "round_robin"],
    ]
