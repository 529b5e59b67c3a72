"""The table that ``antiphon status`` draws."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from antiphon import status
from antiphon.remote import Remote
from core.errors import PreflightError
from core.wire import LoadReport, PageAccount, RankStatus, Role
from tests.support.wires import incarnation, rank_info


def up(rank: str, **load: int) -> status.Json:
    said = RankStatus(
        info=rank_info(incarnation(), Role.DECODE),
        load=LoadReport(**load),
        pages=PageAccount(total=1000, free=500, cached=250, owned=250),
        handoffs={},
        uptime_s=61.4,
    )
    return {"rank": rank, "role": "decode", "state": "up", **msgspec.to_builtins(said)}


def answer(*ranks: status.Json, reason: str = "") -> status.Json:
    return {
        "model": "tiny",
        "ready": not reason,
        "reason": reason,
        "serving": "unified",
        "ranks": list(ranks),
    }


def cells(line: str) -> list[str]:
    return [cell for cell in line.split("  ") if cell]


def test_a_line_for_the_whole_and_one_for_each_rank():
    table = status.render(
        answer(
            up(
                "decode/0/0",
                running_requests=3,
                waiting_requests=2,
                handoff_requests=1,
                prompt_tokens=200,
                cached_tokens=50,
                output_tokens=777,
                kv_bytes_received=3 * 2**20,
            )
        )
    )
    title, serving, empty, head, row = table.splitlines()
    assert (title, serving) == ("tiny: ready", "unified")
    assert empty == ""
    assert [cell.strip() for cell in cells(row)] == [
        "decode/0/0", "up", "3", "2", "1", "25% of 1000", "50%", "25%", "777", "0 B", "3.0 MiB",
        "61 s",
    ]  # fmt: skip
    assert len(cells(head)) == len(cells(row)) == len(status.COLUMNS)
    assert head.index("KV received") == row.index("3.0 MiB")


def test_what_is_not_up_says_why():
    table = status.render(
        answer(
            {"rank": "prefill/0/0", "role": "prefill", "state": "no session"},
            {"rank": "decode/0/0", "role": "decode", "state": "lost", "reason": "no answer"},
            up("decode/0/1"),
            reason="no session yet with prefill/0/0",
        )
    )
    assert "tiny: NOT READY: no session yet with prefill/0/0" in table
    lines = [cells(line) for line in table.splitlines()[4:]]
    assert [cell.strip() for cell in lines[0]] == ["prefill/0/0", "no session"]
    assert [cell.strip() for cell in lines[1]] == ["decode/0/0", "lost no answer"]
    assert lines[2][7].strip() == "0%"  # no prompt yet


def test_where_prompts_were_computed_is_said_of_all_decode_ranks():
    one, two = up("decode/0/0"), up("decode/1/0")
    one["transfers"] = {"placed": {"local": 3, "remote_long": 4}}
    two["transfers"] = {"placed": {"local": 1, "remote_long": 1, "remote_first": 2}}
    line = status.render(answer(one, two)).splitlines()[2]
    since, _, counts = line.partition(": ")
    assert since == "prompts since the ranks started"
    assert counts == "7 handed over (long 5, first 2), 4 computed by decode ranks"


def test_a_stuck_rank_says_for_how_long_and_in_what():
    stuck = {"rank": "decode/0/0", "role": "decode", "state": "stuck", "stuck_s": 34.2}
    table = status.render(answer({**stuck, "reason": "in 'launch' of step 9"}))
    assert "decode/0/0  stuck for 34 s in 'launch' of step 9" in table


def life(crashes: int, retry_s: float | None = None) -> status.Json:
    problem = "its process was ended by SIGKILL"
    phase = "serving" if retry_s is None else "resting"
    return {"phase": phase, "crashes": crashes, "problem": problem, "retry_s": retry_s}


def test_crashes_are_told_with_the_last_reason_and_when_it_is_tried_again():
    resting = {"rank": "decode/1/0", "role": "decode", "state": "resting", "reason": ""}
    table = status.render(
        answer(
            {**up("decode/0/0"), "life": life(1)},
            {**resting, "life": life(5, 51.2)},
            {**up("prefill/0/0"), "life": life(0)},
        )
    )
    lines = table.splitlines()
    assert [cell.strip() for cell in cells(lines[5])] == ["decode/1/0", "resting"]
    assert lines[-3:] == [
        "",
        "decode/0/0: 1 crash; the last: its process was ended by SIGKILL",
        "decode/1/0: 5 crashes in a row, tried again in 51 s; the last: its process was ended by"
        " SIGKILL",
    ]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**42, "4096.0 GiB"),
    ],
)
def test_bytes_are_said_in_a_fitting_unit(count, words):
    assert words in status.render(answer(up("decode/0/0", kv_bytes_sent=count)))


def serve(monkeypatch: pytest.MonkeyPatch, code: int) -> list[str]:
    asked: list[str] = []

    def request(method: str, url: str, **_: object) -> httpx.Response:
        asked.append(f"{method} {url}")
        return httpx.Response(code, json=answer(), request=httpx.Request(method, url))

    monkeypatch.setattr(httpx, "request", request)
    return asked


def test_fetch_asks_the_routers_status_page(monkeypatch):
    asked = serve(monkeypatch, 200)
    assert status.fetch(Remote("http://there:8000/")) == answer()
    assert asked == ["GET http://there:8000/status"]


def test_fetch_names_the_fix_when_something_else_answers(monkeypatch):
    serve(monkeypatch, 404)
    with pytest.raises(PreflightError, match=r"antiphon serve.*--url"):
        status.fetch(Remote("http://there:8000"))


def test_fetch_names_the_fix_when_nobody_answers():
    with pytest.raises(PreflightError, match=r"no router answers on http://127\.0\.0\.1:9"):
        status.fetch(Remote("http://127.0.0.1:9"))
