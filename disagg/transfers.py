"""The writes and renewals of all rooms of a sender: asked for here, heard of here as events.

``ended`` is called when one has ended, on the thread that it ran on; every other method belongs
under the sender's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from core.clock import Clock
from core.errors import TransferError
from core.handoffs import HandoffCount
from disagg.copier import Copier
from disagg.events import OutgoingEvent, Renewed, WriteDone
from disagg.registers import OpenRoom
from disagg.writers import Finished, Submit, Writers, Written

log = logging.getLogger(__name__)

RoomEvent = tuple[int, OutgoingEvent]


class Transfers:
    """Counts what they move. ``rooms`` are the live ones; ``submit`` replaces threads in tests."""

    def __init__(
        self,
        copier: Copier,
        rooms: Mapping[int, OpenRoom],
        count: HandoffCount,
        clock: Clock,
        ended: Callable[[], None],
        submit: Submit | None,
    ) -> None:
        self._copier = copier
        self._count = count
        self._clock = clock
        self._writers = Writers(submit, ended)
        self._rooms = rooms
        self._stale: set[int] = set()  # rooms that wait for a renewal not yet begun
        self._renewing: frozenset[int] = frozenset()  # rooms that the renewal under way serves

    def write(self, room: int, record: OpenRoom, start: int, stop: int) -> None:
        """Send the tokens [start, stop) to where the room's latest announcement says."""
        claim = record.claim
        assert claim is not None, room
        if record.sending_s is None:
            record.sending_s = self._clock.now()
        job = partial(self._copier.copy, claim, record.slots, start, stop)
        self._writers.write(room, claim.address, job)

    def renew(self, room: int) -> None:
        """Replace the engine, for a room whose write failed."""
        self._stale.add(room)
        self._renew()

    def events(self) -> list[RoomEvent]:
        """What has ended since the last call.

        Raises what a write raised that is no failure of the transfer, and TransferError when the
        engine could not be replaced: the rank cannot go on.
        """
        found: list[RoomEvent] = []
        for item in self._writers.finished():
            if item.room is None:
                found += self._renewed(item)
            else:
                found.append((item.room, self._written(item.room, item)))
        return found

    def close(self) -> None:
        """Stop the writer threads after the writes in progress; does not wait for them."""
        self._writers.close()

    def _renew(self) -> None:
        """Start replacing the engine for all rooms that wait for it, unless one is under way.

        A renewal serves the writes that had failed before it began, and no later ones.
        """
        if self._stale and not self._renewing:
            self._renewing, self._stale = frozenset(self._stale), set()
            self._writers.renew(self._copier.renew)

    def _renewed(self, item: Finished) -> list[RoomEvent]:
        if item.error is not None:
            raise item.error
        self._count.fences += 1
        served, self._renewing = self._renewing, frozenset()
        self._renew()
        return [(room, Renewed()) for room in served]

    def _written(self, room: int, item: Finished) -> WriteDone:
        record, error = self._rooms[room], item.error  # it closes after its last write
        if error is None:
            self._book(record, item.written)
        elif isinstance(error, TransferError):
            self._count.failed["write_failed"] += 1
            log.warning("room %d: KV write to %s failed: %s", room, item.target, error)
        else:
            raise error
        return WriteDone(ok=error is None, problem=str(error or ""))

    def _book(self, record: OpenRoom, written: Written) -> None:
        self._count.moved_bytes += written.count
        self._count.write_s += written.took_s
        record.moved_bytes += written.count
        record.writes += 1
        record.checksums = written.checksums or record.checksums
