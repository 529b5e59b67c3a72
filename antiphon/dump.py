"""``antiphon dump``: fetch what a router and its ranks are doing and write it as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from antiphon.remote import Json, Remote
from core.dump import QueueView, RankDump, RoomView, SequenceView, format_busy, format_step

SHOWN_STEPS = 16  # of the latest; --json has all that the rank keeps
SEQUENCE_HEAD = ("rid", "state", "prompt", "output", "computed", "cached", "row", "room", "age")
ROOM_HEAD = ("room", "rid", "phase", "sent", "computed", "of", "age", "peer")


def fetch(router: Remote, rank: str | None) -> Json:
    """GET /admin/dump of one rank or of all; raises as ``Remote.ask`` does."""
    return router.ask("/admin/dump", params={} if rank is None else {"rank": rank})


def render(dump: Json) -> str:
    """The router first, then every rank."""
    return "\n".join([*_router(dump), *(line for rank in dump["ranks"] for line in _rank(rank))])


def _router(dump: Json) -> Iterator[str]:
    streams, sessions = dump["streams"], dump["sessions"]
    yield f"router: {len(streams)} open streams"
    yield from _table(
        ("rid", "attempt", "ranks", "room", "produced", "age"),
        [
            (
                s["rid"],
                s["attempt"] or "looks for a route",
                " -> ".join(s["ranks"]),
                str(s["room"]),
                str(s["produced"]),
                _age(s["age_s"]),
            )
            for s in streams
        ],
    )
    yield f"router: {len(sessions)} ranks"
    yield from _table(
        ("rank", "state", "session", "outstanding", "incarnation"),
        [
            (
                s["rank"],
                s["state"],
                "up" if s["up"] else "none",
                f"{s['outstanding_requests']} requests, {s['outstanding_tokens']} tokens",
                s["incarnation"],
            )
            for s in sessions
        ],
    )


def _rank(rank: Json) -> Iterator[str]:
    yield ""
    if rank["problem"]:
        yield f"{rank['rank']}: {rank['problem']}"
        return
    dump = msgspec.convert(rank["dump"], RankDump)
    busy = dump.busy
    doing = "waits" if busy is None else f"busy for {_age(busy.for_s)} {format_busy(busy)}"
    yield (
        f"{rank['rank']}: pid {dump.pid}, up {_age(dump.uptime_s)}, {doing};"
        f" {dump.stuck_steps} stuck steps"
    )
    if dump.queues is None:
        yield f"  queues: {dump.note}"
    else:
        yield from _queues(dump.queues)
    shown = dump.steps[-SHOWN_STEPS:]
    yield f"  the last {len(shown)} steps, latest last, and the ms of their parts"
    yield from (f"    {format_step(record)}" for record in shown)
    for thread in dump.threads:
        yield f"  thread {thread.name}"
        yield from (f"    {line}" for line in thread.stack.splitlines())


def _queues(queues: QueueView) -> Iterator[str]:
    pages = queues.pages
    lost = "" if pages.whole else ", SOME ARE LOST"
    yield (
        f"  pages: {pages.total} = {pages.free} free + {pages.cached} cached"
        f" + {pages.owned} owned{lost}"
    )
    yield f"  sequences: {len(queues.sequences)}"
    yield from _table(SEQUENCE_HEAD, [_sequence(s) for s in queues.sequences])
    yield f"  handoffs: {len(queues.rooms)}"
    yield from _table(ROOM_HEAD, [_room(room) for room in queues.rooms])


def _sequence(sequence: SequenceView) -> tuple[str, ...]:
    retracted = f" (retracted {sequence.retractions} times)" if sequence.retractions else ""
    return (
        sequence.rid,
        f"{sequence.state}{retracted}",
        str(sequence.prompt),
        str(sequence.output),
        str(sequence.computed),
        str(sequence.cached),
        "-" if sequence.row < 0 else str(sequence.row),
        str(sequence.room),
        _age(sequence.age_s),
    )


def _room(room: RoomView) -> tuple[str, ...]:
    return (
        str(room.room),
        room.rid,
        room.phase,
        str(room.sent),
        str(room.computed),
        str(room.total),
        "?" if room.age_s is None else _age(room.age_s),
        room.peer or "-",
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Indented lines; nothing where there are no rows."""
    if not rows:
        return
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield f"    {'  '.join(cells)}".rstrip()


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s"
