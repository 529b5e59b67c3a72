"""Where a request is, as the ranks themselves tell it, so that a fault can be aimed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from core.dump import RankDump, RoomView, SequenceView
from core.wire import RankId

POLL_S = 0.01
DECODED = 8  # output tokens after which a request counts as decoding


class Phase(StrEnum):
    """Of one request; the last is of a request with several choices."""

    QUEUED = "queued"  # the prefill rank has not begun
    PREFILLING = "prefilling"  # some of the prompt is computed
    SENDING = "sending"  # some of the prompt is computed, and a KV write is in flight
    WAITING = "waiting"  # the first token is out, the decode rank awaits KV
    DECODING = "decoding"
    SEVERAL = "n>1"  # all of several choices are decoding


HELD = frozenset({Phase.SENDING, Phase.WAITING})  # writes must be held to see them


@dataclass(frozen=True)
class Leg:
    """One choice of the request on one rank."""

    rank: RankId
    sequence: SequenceView
    room: RoomView | None


@dataclass(frozen=True)
class Sighting:
    """A request in a phase, and who has it."""

    phase: Phase
    prefill: RankId | None  # None: no prefill rank has it any more
    decode: RankId

    def hit(self, victims: Collection[RankId]) -> bool:
        """Whether it is on one of these ranks, or past the role that they all have."""
        if self.prefill is None and all(v.group == "prefill" for v in victims):
            return True  # which then must not be disturbed
        return self.prefill in victims or self.decode in victims


def legs(dumps: dict[RankId, RankDump], prompt: int) -> list[Leg]:
    """The legs of every request with a prompt of this length: probes have lengths of their own."""
    found = []
    for rank, dump in dumps.items():
        if dump.queues is not None:
            rooms = {room.rid: room for room in dump.queues.rooms}
            found += [
                Leg(rank, sequence, rooms.get(sequence.rid))
                for sequence in dump.queues.sequences
                if sequence.prompt == prompt
            ]
    return found


def crowd(dumps: dict[RankId, RankDump], choices: Mapping[int, int]) -> Iterator[Sighting]:
    """Every request that is in a clear phase. ``choices`` are known by the length of the prompt."""
    for prompt, n in choices.items():
        together = defaultdict[str, list[Leg]](list)
        for leg in legs(dumps, prompt):
            attempt = leg.sequence.rid.rpartition(".")[0]
            together[attempt if n == 1 else attempt.rpartition("-")[0]].append(leg)
        for mine in together.values():
            if seen := sight(mine, n):
                yield seen


def sight(found: list[Leg], choices: int) -> Sighting | None:
    """The phase of a request, where it is in a clear one."""
    before = [leg for leg in found if leg.rank.group == "prefill"]
    after = [leg for leg in found if leg.rank.group == "decode"]
    if choices > 1:
        if sum(map(_decodes, after)) < choices:
            return None
        ranks = [leg.rank for leg in after]
        return Sighting(Phase.SEVERAL, None, max(ranks, key=ranks.count))
    if not after:
        return None
    decode = after[0]
    if not before:
        return Sighting(Phase.DECODING, None, decode.rank) if _decodes(decode) else None
    phase = _early(before[0], decode)
    return None if phase is None else Sighting(phase, before[0].rank, decode.rank)


def _early(prefill: Leg, decode: Leg) -> Phase | None:
    """The phase of a request that the prefill rank still has."""
    sequence, room = prefill.sequence, prefill.room
    if sequence.state == "waiting":
        return Phase.QUEUED
    if sequence.state == "sending" and decode.sequence.state == "awaiting_kv":
        return Phase.WAITING
    if sequence.state != "running" or not 0 < sequence.computed < sequence.prompt:
        return None
    writing = room is not None and room.phase == "sending" and room.sent < room.computed
    return Phase.SENDING if writing else Phase.PREFILLING


def _decodes(leg: Leg) -> bool:
    return leg.sequence.state == "running" and leg.sequence.output >= DECODED


Look = Callable[[], Awaitable[dict[RankId, RankDump]]]


async def reach(
    look: Look, prompt: int, choices: int, phase: Phase, timeout_s: float
) -> Sighting | None:
    """Wait until the request is in the phase; None where it never was seen in it."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                seen = sight(legs(await look(), prompt), choices)
                if seen is not None and fits(seen.phase, phase):
                    return seen
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return None


def fits(seen: Phase, wanted: Phase) -> bool:
    """Prefilling is wanted with or without a write in flight: chunks are sent as they come."""
    return seen is wanted or (seen is Phase.SENDING and wanted is Phase.PREFILLING)
