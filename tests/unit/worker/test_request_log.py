"""One request can be followed through the log by its id."""

from __future__ import annotations

import logging

import pytest

from tests.support.calm_pair import CalmPair
from tests.support.engines import Bench, Listener, make_unified
from tests.support.requests import request

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def said(caplog):
    """What was logged about a request, in order."""
    caplog.set_level(logging.INFO)

    def about(rid: str) -> list[str]:
        return [r.getMessage() for r in caplog.records if getattr(r, "rid", None) == rid]

    return about


def starts(lines: list[str], *words: str) -> None:
    assert len(lines) == len(words), lines
    for line, word in zip(lines, words, strict=True):
        assert line.startswith(word), lines


def test_a_handoff_from_submit_to_the_last_token(said):
    pair = CalmPair()
    pair.send(pair.ask("r", PROMPT, 4, room=7), pair.prefill)
    pair.step(pair.prefill)
    pair.send(pair.ask("r", PROMPT, 4, room=7), pair.decode)
    pair.settle()
    lines = said("r")
    prefill_alone = ["submitted: 5 tokens", "first token", "ended: left to the other leg"]
    assert {word for word in prefill_alone if any(x.startswith(word) for x in lines)} == {
        *prefill_alone
    }
    assert "room 7 announced to link0, 0 of 5 tokens held" in lines
    assert "room 7 claimed by link0" in lines
    assert "all KV sent" in lines
    assert "all KV arrived" in lines
    assert lines[-1] == "ended: length, 4 tokens of output"


def test_a_rank_that_decodes_many_tokens_logs_no_more_than_for_few(said):
    listener = Listener(make_unified())
    for rid, count in (("few", 2), ("many", 40)):
        listener.submit(request(rid, PROMPT, count))
    listener.step(60)
    starts(said("few"), "submitted", "first token", "ended: length")
    starts(said("many"), "submitted", "first token", "ended: length")


def test_a_refused_request_and_a_lost_link(said):
    listener = Listener(make_unified())
    listener.submit(request("long", list(range(200)), 4))
    starts(said("long"), "refused: the prompt has 200 tokens")
    pair = CalmPair()
    pair.send(pair.ask("r", PROMPT, 4, room=7))
    pair.step(pair.decode)
    pair.break_link()
    pair.settle()
    assert "handoff failed: the link to the prefill rank ended" in said("r")
    assert any(line.startswith("ended: error") for line in said("r"))


def test_a_retraction(said):
    bench = Bench(pages=24, step_tokens=64)
    bench.add("a", list(range(10)), 12)
    bench.add("b", list(range(20, 30)), 12)
    bench.run()
    retracted = [line for rid in "ab" for line in said(rid)]
    assert len(retracted) == bench.scheduler.retractions > 0
    assert all(line.startswith("retracted for lack of pages, with 1") for line in retracted)
