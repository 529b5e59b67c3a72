"""Everything an engine holds, for ``antiphon dump``. In the engine's thread only."""

from __future__ import annotations

import msgspec

from core.dump import QueueView, RoomView, SequenceView
from worker.engine import Engine
from worker.sequence import Sequence


def queues(engine: Engine, now: float) -> QueueView:
    """Sequences in the order in which they matter, open handoffs, and where the pages are."""
    scheduler = engine.scheduler
    ordered = [*scheduler.running, *scheduler.waiting, *engine.role.waiting]
    seen = set(ordered)
    ordered += [s for s in engine.streams.sequences() if s not in seen]
    arrived = {s.room: s.arrived_s for s in ordered}
    return QueueView(
        pages=scheduler.cache.account(),
        sequences=tuple(_view(s, now) for s in ordered),
        rooms=tuple(_aged(room, arrived, now) for room in engine.role.rooms()),
    )


def _view(sequence: Sequence, now: float) -> SequenceView:
    return SequenceView(
        rid=sequence.rid,
        router=sequence.router,
        state=sequence.state.value,
        prompt=sequence.request.prompt_len,
        output=sequence.output_len,
        computed=sequence.computed_len,
        cached=sequence.cached_len,
        row=sequence.row,
        room=sequence.room,
        retractions=sequence.retractions,
        age_s=now - sequence.arrived_s,
    )


def _aged(room: RoomView, arrived: dict[int, float], now: float) -> RoomView:
    if room.room not in arrived:
        return room
    return msgspec.structs.replace(room, age_s=now - arrived[room.room])
