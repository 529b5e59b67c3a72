"""Ctrl-C in ``antiphon bench``: what had ended is reported, and nothing more is sent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.command import INTERRUPTED
from tests.support.fake_openai import Answer, says, serving, usage

ANTIPHON = Path(sys.executable).with_name("antiphon")


def answers(number: int) -> Callable[[object], Answer]:
    """So many requests are answered; the streams of the others never end."""
    left = iter(range(number))

    def script(_: object) -> Answer:
        stall = next(left, None) is None
        return Answer(stall=True) if stall else says(" yes", usage=usage(10, 1))

    return script


def interrupted(url: str, *words: object, after: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run that gets SIGINT once a line begins with ``after``."""
    process = subprocess.Popen(
        [ANTIPHON, "bench", "--url", url, "--warmup", "0", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        said = ""
        while not said.startswith(after):
            said = process.stderr.readline()
            assert said, process.communicate()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("pace", "answered"),
    [(("--concurrency", 2), 3), (("--rate", 0.001), 1)],
    ids=["closed", "open"],
)
def test_what_had_ended_is_kept(pace, answered, tmp_path):
    files = [tmp_path / name for name in ("run.jsonl", "requests.jsonl", "run.png")]
    plotting = ("--plot", files[2]) if find_spec("matplotlib") else ()
    words = (*pace, "--requests", 10, "--json", files[0], "--requests-json", files[1], *plotting)
    with serving(answers(answered)) as fake:
        code, out, err = interrupted(fake.url, *words, after=f"{answered}/10 requests")
        assert len(fake.bodies) <= answered + 2
    assert code == INTERRUPTED == 130
    assert "Traceback" not in err
    assert f"{answered} ok, 0 failed" in out
    assert f"interrupted       after {answered} of 10 requests" in out
    (line,) = map(json.loads, files[0].read_text().splitlines())
    assert (line["interrupted"], line["planned"], line["result"]["ok"]) == (True, 10, answered)
    assert len(files[1].read_text().splitlines()) == answered
    assert files[2].exists() == bool(plotting)


def test_nothing_to_report_is_said_in_a_line(tmp_path):
    """No line of progress tells when to press: the request does."""
    path = tmp_path / "run.jsonl"
    with serving(answers(0)) as fake:
        script = fake.script

        def told(body: object) -> Answer:
            process.send_signal(signal.SIGINT)
            return script(body)

        fake.script = told
        process = subprocess.Popen(
            [
                ANTIPHON,
                "bench",
                "--url",
                fake.url,
                "--concurrency",
                "1",
                "--warmup",
                "0",
                "--json",
                path,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (INTERRUPTED, "")
    assert err == "antiphon: interrupted before a request had ended: no result\n"
    assert path.read_text() == ""
