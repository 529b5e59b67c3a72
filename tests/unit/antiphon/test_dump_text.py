"""What ``antiphon dump`` writes."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from antiphon import dump
from antiphon.cli import OPERATOR_ERROR, main
from core.dump import (
    Busy,
    QueueView,
    RankDump,
    RoomView,
    SequenceView,
    StepRecord,
    ThreadStack,
)
from core.wire import PageAccount
from tests.support.wires import incarnation

LIFE = incarnation()
BUSY = Busy(
    turn=1, for_s=34.0, lap="launch", step=9, extend_rows=0, decode_rows=1, tokens=1, rids=("r.0",)
)


def step(number: int) -> StepRecord:
    return StepRecord(step=number, at=0.0, took_s=0.001, laps={"poll": 0.001})


def rank(**changes: Any) -> dump.Json:
    told = RankDump(
        incarnation=LIFE,
        pid=77,
        uptime_s=61.4,
        busy=None,
        stuck_steps=0,
        steps=tuple(step(number) for number in range(1, 41)),
        threads=(ThreadStack(name="step-loop", ident=1, stack="  File a\n    b()"),),
    )
    told = msgspec.structs.replace(told, **changes)
    return {"rank": "decode/0/0", "problem": "", "dump": msgspec.to_builtins(told)}


def answer(*ranks: dump.Json) -> dump.Json:
    stream = {
        "rid": "r", "attempt": "r.0", "ranks": ["prefill/0/0", "decode/0/0"], "room": 7,
        "produced": 3, "age_s": 2.5,
    }  # fmt: skip
    session = {
        "rank": "decode/0/0", "role": "decode", "state": "serving", "incarnation": str(LIFE),
        "up": True, "outstanding_requests": 1, "outstanding_tokens": 12,
    }  # fmt: skip
    return {"streams": [stream], "sessions": [session], "ranks": list(ranks)}


def row(text: str, first: str) -> list[str]:
    """The cells of the line that begins with ``first``."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{first} ")]
    return [cell.strip() for cell in line.strip().split("  ") if cell]


def test_the_router_comes_first():
    text = dump.render(answer())
    assert text.splitlines()[0] == "router: 1 open streams"
    assert row(text, "r") == ["r", "r.0", "prefill/0/0 -> decode/0/0", "7", "3", "2.5 s"]
    assert row(text, "decode/0/0") == [
        "decode/0/0", "serving", "up", "1 requests, 12 tokens", str(LIFE),
    ]  # fmt: skip


def test_a_working_rank_with_its_queues():
    queues = QueueView(
        pages=PageAccount(total=10, free=5, cached=3, owned=2),
        sequences=(
            SequenceView(
                rid="r.0", router="x", state="awaiting_kv", prompt=5, output=0, computed=0,
                cached=4, row=2, room=7, retractions=0, age_s=1.25,
            ),
        ),
        rooms=(RoomView(room=7, rid="r.0", phase="announced", peer="out1", total=5, age_s=1.25),),
    )  # fmt: skip
    text = dump.render(answer(rank(queues=queues)))
    assert "decode/0/0: pid 77, up 61.4 s, waits; 0 stuck steps" in text
    assert "pages: 10 = 5 free + 3 cached + 2 owned\n" in text
    assert row(text, "r.0") == ["r.0", "awaiting_kv", "5", "0", "0", "4", "2", "7", "1.2 s"]
    assert row(text, "7") == ["7", "r.0", "announced", "0", "0", "5", "1.2 s", "out1"]
    shown = [line for line in text.splitlines() if line.startswith("    #")]
    assert shown[-1].startswith("    #40 ")
    assert len(shown) == dump.SHOWN_STEPS


def test_a_stuck_rank_shows_what_it_is_stuck_in():
    text = dump.render(answer(rank(busy=BUSY, stuck_steps=1, note="the step loop did not show")))
    assert "busy for 34.0 s in 'launch' of step 9 with" in text
    assert "  queues: the step loop did not show" in text
    assert "  thread step-loop\n      File a\n        b()" in text


def test_a_rank_that_gives_no_dump_and_pages_that_are_lost():
    silent = {"rank": "decode/0/0", "problem": "gave no dump"}
    assert dump.render(answer(silent)).endswith("\ndecode/0/0: gave no dump")
    leak = QueueView(pages=PageAccount(total=10, free=5, cached=3, owned=1), sequences=(), rooms=())
    assert "1 owned, SOME ARE LOST" in dump.render(answer(rank(queues=leak)))


@pytest.fixture
def router(monkeypatch):
    """Answers every GET as told; keeps what was asked."""
    asked: list[tuple[str, dict[str, str]]] = []

    def answers(code: int, body: object) -> list[tuple[str, dict[str, str]]]:
        def get(method: str, url: str, params: dict[str, str], **_: object) -> httpx.Response:
            asked.append((url, params))
            return httpx.Response(code, json=body, request=httpx.Request(method, url))

        monkeypatch.setattr(httpx, "request", get)
        return asked

    return answers


def test_the_command_asks_for_one_rank_or_for_all(router, capsys):
    asked = router(200, answer(rank()))
    assert main(["dump", "--url", "http://there:8000/"]) == 0
    assert "decode/0/0: pid 77" in capsys.readouterr().out
    assert main(["dump", "--url", "http://there:8000", "--rank", "decode/0/0", "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")
    url = "http://there:8000/admin/dump"
    assert asked == [(url, {}), (url, {"rank": "decode/0/0"})]


def test_a_refusal_is_told_in_the_routers_words(router, capsys):
    router(400, {"error": {"message": "no rank 'x': there are decode/0/0"}})
    assert main(["dump", "--rank", "x"]) == OPERATOR_ERROR
    assert "no rank 'x': there are decode/0/0" in capsys.readouterr().err
    router(404, {"detail": "what?"})
    assert main(["dump"]) == OPERATOR_ERROR
    assert "something else answers 404" in capsys.readouterr().err


def test_nobody_there(capsys):
    assert main(["dump", "--url", "http://127.0.0.1:9"]) == OPERATOR_ERROR
    assert "no router answers on http://127.0.0.1:9" in capsys.readouterr().err
