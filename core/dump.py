"""What a rank is doing right now: the answer to ``antiphon dump``. Token counts, never token ids.

Ages and durations are in seconds. An age counts from the arrival of the request at this rank.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence

import msgspec

from core.wire import Incarnation, PageAccount

STACK_FRAMES = 64  # innermost frames of a thread that are shown
RIDS = 16  # requests of a step that are named


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a step loop: events in, one step, reports out."""

    step: int  # of the engine, since start
    at: float  # epoch seconds of its begin
    took_s: float
    laps: dict[str, float]  # part of the turn -> seconds, in order
    extend_rows: int = 0  # sequences that computed prompt tokens
    decode_rows: int = 0  # sequences that wanted one more token
    tokens: int = 0  # computed, of all rows
    running: int = 0  # from here on: as it was at the end of the turn
    waiting: int = 0  # in the scheduler's queue
    live: int = 0  # requests in any state
    free_pages: int = 0
    retractions: int = 0  # since start


class Busy(msgspec.Struct, frozen=True, kw_only=True):
    """The turn that a step loop is in."""

    turn: int  # tells turns apart
    for_s: float
    lap: str  # what it does now
    step: int
    extend_rows: int  # of the plan, where there is one already
    decode_rows: int
    tokens: int
    rids: tuple[str, ...]  # whose rows they are


class SequenceView(msgspec.Struct, frozen=True, kw_only=True):
    """One request on this rank. Lengths in tokens."""

    rid: str
    router: str
    state: str
    prompt: int
    output: int  # tokens so far, counting those generated elsewhere before
    computed: int  # tokens whose KV is here
    cached: int  # of the prompt, found in the cache
    row: int  # in the request table; -1: it owns no pages
    room: int
    retractions: int
    age_s: float


class RoomView(msgspec.Struct, frozen=True, kw_only=True):
    """One handoff that is not over. Tokens of ``total``, which the prompt has."""

    room: int
    rid: str
    phase: str
    peer: str  # the link; empty: not claimed yet
    sent: int = 0  # prefill: landed at the decode rank, or held there before
    computed: int = 0  # prefill: ready to be sent
    total: int = 0
    age_s: float | None = None  # None: its request has not come yet, or has gone


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """What only the step thread may look at."""

    pages: PageAccount
    sequences: tuple[SequenceView, ...]  # running, waiting in order, then the others
    rooms: tuple[RoomView, ...]


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """Where one thread of the process is."""

    name: str
    ident: int
    stack: str  # outermost frame first, as in a traceback


class RankDump(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's answer to ``antiphon dump``."""

    incarnation: Incarnation
    pid: int
    uptime_s: float
    busy: Busy | None  # None: the step loop waits for events
    stuck_steps: int  # that took longer than the watchdog allows
    steps: tuple[StepRecord, ...]  # oldest first
    threads: tuple[ThreadStack, ...]
    queues: QueueView | None = None
    note: str = ""  # why there are no queues


def format_step(record: StepRecord, at: str = "") -> str:
    """One line; ``at`` says when, in words."""
    laps = " ".join(f"{name} {1000 * took_s:.1f}" for name, took_s in record.laps.items())
    return (
        f"#{record.step}{at} {1000 * record.took_s:.1f} ms ({laps}): "
        f"{record.extend_rows} extend + {record.decode_rows} decode rows, {record.tokens} tokens; "
        f"running {record.running}, waiting {record.waiting}, live {record.live}; "
        f"{record.free_pages} free pages, {record.retractions} retractions"
    )


def format_busy(busy: Busy) -> str:
    """What it is busy with, as a part of a sentence."""
    where = f"in {busy.lap!r} of step {busy.step}"
    if not busy.rids:
        return where
    rids = ", ".join(busy.rids[:RIDS]) + (", ..." if len(busy.rids) > RIDS else "")
    rows = f"{busy.extend_rows} extend + {busy.decode_rows} decode rows, {busy.tokens} tokens"
    return f"{where} with {rows} of {rids}"


def thread_stacks(only: Sequence[int] = ()) -> tuple[ThreadStack, ...]:
    """The stacks of all Python threads of this process, or of those with these ids."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return tuple(
        ThreadStack(
            name=names.get(ident, "unknown"),
            ident=ident,
            stack="".join(traceback.format_stack(frame)[-STACK_FRAMES:]).rstrip(),
        )
        for ident, frame in sorted(sys._current_frames().items())
        if not only or ident in only
    )
