"""Stacks of threads, and the words for steps."""

from __future__ import annotations

import threading

from core.dump import RIDS, STACK_FRAMES, Busy, StepRecord, format_busy, format_step, thread_stacks


def hold(held: threading.Event, release: threading.Event, depth: int) -> None:
    if depth:
        then_hold(held, release, depth - 1)
    else:
        held.set()
        release.wait(10)


def then_hold(held: threading.Event, release: threading.Event, depth: int) -> None:
    """Takes turns with ``hold``: one that calls itself would be shown in three lines."""
    hold(held, release, depth)


def test_the_stack_of_each_thread_names_where_it_is():
    held, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold, args=(held, release, 2 * STACK_FRAMES), name="held")
    thread.start()
    held.wait(10)
    try:
        stacks = {stack.name: stack for stack in thread_stacks()}
        (alone,) = thread_stacks((thread.ident,))
    finally:
        release.set()
        thread.join()
    assert "thread_stacks" in stacks["MainThread"].stack
    assert alone.name == "held"
    assert alone.stack == stacks["held"].stack
    assert "release.wait(10)" in alone.stack
    assert alone.stack.count("File ") == STACK_FRAMES  # the innermost ones


def test_a_step_is_one_line():
    record = StepRecord(
        step=7, at=0.0, took_s=0.0125, laps={"poll": 0.0025, "launch": 0.01},
        extend_rows=1, decode_rows=3, tokens=515, running=4, waiting=2, live=8, free_pages=100,
    )  # fmt: skip
    assert format_step(record) == (
        "#7 12.5 ms (poll 2.5 launch 10.0): 1 extend + 3 decode rows, 515 tokens; "
        "running 4, waiting 2, live 8; 100 free pages, 0 retractions"
    )


def test_what_a_step_is_busy_with_names_some_of_its_requests():
    def busy(*rids: str) -> Busy:
        return Busy(
            turn=1, for_s=2.0, lap="launch", step=9,
            extend_rows=0, decode_rows=len(rids), tokens=len(rids), rids=rids,
        )  # fmt: skip

    assert format_busy(busy()) == "in 'launch' of step 9"
    two = "in 'launch' of step 9 with 0 extend + 2 decode rows, 2 tokens of a, b"
    assert format_busy(busy("a", "b")) == two
    many = format_busy(busy(*(f"r{i}" for i in range(RIDS + 1))))
    assert many.endswith(f"r{RIDS - 1}, ...")
