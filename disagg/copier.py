"""What a writer thread does for a room: copy slots into the peer's pool, and sum what was sent."""

from __future__ import annotations

from collections.abc import Sequence

from core.clock import Clock
from core.wire import Int32Array
from disagg import checksum, geometry as layout
from disagg.geometry import PageGeometry
from disagg.messages import Announcement
from disagg.transport.base import KVTransport
from disagg.writers import Written


class Copier:
    """The mechanics of writes. ``copy`` and ``renew`` may run on any thread."""

    def __init__(
        self,
        transport: KVTransport,
        geometry: PageGeometry,
        bases: Sequence[int],
        clock: Clock,
        check: checksum.Mode,
    ) -> None:
        self.geometry = geometry
        self.bases = tuple(bases)
        self._transport = transport
        self._clock = clock
        self._check = check
        self.checks_all = check == "all"
        self._reached: dict[str, str] = {}  # peer -> the latest address it announced

    def reach(self, peer: str, address: str) -> None:
        """``peer`` is at this address, and at no earlier one."""
        before, self._reached[peer] = self._reached.get(peer, address), address
        if before != address:
            self._transport.forget(before)

    def lose(self, peer: str) -> None:
        """``peer`` is gone."""
        if (address := self._reached.pop(peer, None)) is not None:
            self._transport.forget(address)

    def copy(self, claim: Announcement, sources: Int32Array, start: int, stop: int) -> Written:
        """Write the tokens [start, stop) of a room; ``sources[i]`` is the slot of token ``i``.

        With the write that ends the prompt come the checksums of all that crossed, where the room
        is checked: whichever it is, the pages hold everything until the room closes.
        """
        began = self._clock.now()
        held, targets = claim.held, claim.slots()
        copies = layout.copies(
            self.geometry,
            self.bases,
            sources[start:stop],
            claim.bases,
            targets[start - held : stop - held],
        )
        self._transport.write(claim.address, copies)
        took_s = self._clock.now() - began
        whole = stop == held + len(targets)
        sums: tuple[int, ...] = ()
        if whole and checksum.wanted(self._check, claim.room):
            sums = checksum.digests(
                self.geometry, self.bases, sources[held:stop], claim.room, whole=self.checks_all
            )
        return Written((stop - start) * self.geometry.token_bytes, took_s, sums)

    def renew(self) -> Written:
        """Replace the engine."""
        self._transport.renew()
        return Written()
