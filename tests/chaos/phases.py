"""Where a request is, as the ranks themselves tell it, so that a fault can be aimed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from core.dump import RankDump, RoomView, SequenceView
from core.wire import RankId
from tests.chaos.load import Ask

DECODED = 8  # output tokens after which a request counts as decoding
LEFT = 60  # fewer tokens to come: it may have ended when the fault strikes


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
    decode: RankId  # which has most of its choices
    decodes: frozenset[RankId] = frozenset()  # which have others
    prompt: int = 0  # its length, which tells who it is

    def hit(self, victims: Collection[RankId]) -> bool:
        """Whether it is on one of these ranks, or past the role that they all have."""
        if self.prefill is None and all(v.group == "prefill" for v in victims):
            return True  # which then must not be disturbed
        return self.prefill in victims or self.decoded_by(victims)

    def between(self, prefill: RankId, decode: RankId) -> bool:
        """Whether its KV goes from one to the other, or went to the other from anywhere."""
        return self.prefill in (None, prefill) and self.decoded_by([decode])

    def decoded_by(self, ranks: Collection[RankId]) -> bool:
        """Whether one of these ranks has a choice of it, or will have it."""
        return not self.decodes.union([self.decode]).isdisjoint(ranks)


def covered(wanted: Phase, aimed: Sighting, hit: Iterable[Sighting]) -> frozenset[Phase]:
    """The phases that a fault counts for: each request that it hits counts for one.

    ``aimed`` is one of them, and counts for ``wanted``. With a write in flight a request that is
    prefilling counts as sending, unless another one does.
    """
    often = Counter(seen.phase for seen in hit if seen is not aimed)
    phases = {wanted, *often}
    if often[Phase.SENDING] > (wanted is not Phase.SENDING):
        phases.add(Phase.PREFILLING)
    return frozenset(phases)


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


def crowd(dumps: dict[RankId, RankDump], asks: Mapping[int, Ask]) -> list[Sighting]:
    """Every request that is in a clear phase. ``asks`` are known by the length of the prompt."""
    return list(_crowd(dumps, asks))


def _crowd(dumps: dict[RankId, RankDump], asks: Mapping[int, Ask]) -> Iterator[Sighting]:
    for prompt, ask in asks.items():
        together = defaultdict[str, list[Leg]](list)
        for leg in legs(dumps, prompt):
            attempt = leg.sequence.rid.rpartition(".")[0]
            together[attempt if ask.n == 1 else attempt.rpartition("-")[0]].append(leg)
        for mine in together.values():
            if seen := sight(mine, ask):
                yield seen


def sight(found: list[Leg], ask: Ask) -> Sighting | None:
    """The phase of a request, where it is in a clear one."""
    before = [leg for leg in found if leg.rank.group == "prefill"]
    after = [leg for leg in found if leg.rank.group == "decode"]
    prompt, decoding = len(ask.prompt), [leg.rank for leg in after if _decodes(leg, ask.tokens)]
    if ask.n > 1:
        if len(decoding) < ask.n:
            return None
        most = max(decoding, key=decoding.count)
        return Sighting(Phase.SEVERAL, None, most, frozenset(decoding), prompt)
    if not after:
        return None
    decode = after[0].rank
    if not before:
        return Sighting(Phase.DECODING, None, decode, prompt=prompt) if decoding else None
    if (phase := _early(before[0], after[0])) is None:
        return None
    return Sighting(phase, before[0].rank, decode, prompt=prompt)


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


def _decodes(leg: Leg, tokens: int) -> bool:
    return leg.sequence.state == "running" and DECODED <= leg.sequence.output <= tokens - LEFT


def fits(seen: Phase, wanted: Phase) -> bool:
    """Prefilling is wanted with or without a write in flight: chunks are sent as they come."""
    return seen is wanted or (seen is Phase.SENDING and wanted is Phase.PREFILLING)
