"""What must be so whatever happened: tokens, pages, rooms, file descriptors, and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from core.dump import RankDump
from core.wire import Incarnation, RankId, RankStatus
from router.rpc.gen import antiphon_pb2 as pb
from tests.chaos.cluster import RANKS, Cluster
from tests.chaos.load import Got
from tests.chaos.phases import legs

Verdict = Callable[[Got, Got], str]  # a stream and the undisturbed one: its problem, or empty

REST_S = 30.0
IN_USE = 16  # what a fresh rank opens when it is first used: its spare transfer process, links


def whole(got: Got, reference: Got) -> str:
    """The problem of a stream that had to come to its end, or empty."""
    if got.status != "OK":
        return f"{got.ask.name} ended with {got.status}: {got.words}"
    if problem := beginning(got, reference):
        return problem
    if any(len(tokens) != got.ask.tokens for tokens in got.tokens):
        return f"{got.ask.name} brought {list(map(len, got.tokens))} of {got.ask.tokens} tokens"
    if set(got.finish) != {pb.FINISH_REASON_LENGTH}:
        return f"{got.ask.name} finished with {got.finish}"
    usage = (len(got.ask.prompt), got.ask.n * got.ask.tokens)
    return "" if got.usage == usage else f"{got.ask.name} says usage {got.usage}, not {usage}"


def beginning(got: Got, reference: Got) -> str:
    """The problem of a stream whose tokens so far are not those of the undisturbed run."""
    for choice, (mine, theirs) in enumerate(zip(got.tokens, reference.tokens, strict=True)):
        for place, pair in enumerate(zip(mine, theirs, strict=False)):
            if pair[0] != pair[1]:
                return (
                    f"{got.ask.name} choice {choice}: token {place} is {pair[0]}, not {pair[1]}"
                    f" (of {len(mine)})"
                )
        if len(mine) > len(theirs):
            return f"{got.ask.name} choice {choice}: {len(mine) - len(theirs)} tokens too many"
    return ""


def whole_or_excused(got: Got, reference: Got) -> str:
    """The same where no rank may have been left: the stream may have ended, if it says why."""
    if got.status == "UNAVAILABLE" and got.words:
        return beginning(got, reference)
    return whole(got, reference)


def whole_or_full(got: Got, reference: Got) -> str:
    """The same where the router may have been full when the stream came."""
    if got.status == "RESOURCE_EXHAUSTED" and got.words and not any(got.tokens):
        return ""
    return whole(got, reference)


def whole_or(verdict: Verdict) -> Verdict:
    """The same where the end that ``verdict`` wants may have come first."""

    def either(got: Got, reference: Got) -> str:
        problem = verdict(got, reference)
        return problem and whole(got, reference) and problem

    return either


def aborted(got: Got, reference: Got) -> str:
    """The problem of a stream that was to be aborted by id."""
    if got.status != "OK" or set(got.finish) != {pb.FINISH_REASON_ABORT}:
        return f"{got.ask.name} was aborted and ended with {got.status} {got.finish}: {got.words}"
    return beginning(got, reference)


def ended(status: str, got: Got, reference: Got) -> str:
    """The problem of a stream that was to end with a certain gRPC status."""
    if got.status != status:
        return f"{got.ask.name} ended with {got.status} {got.words}, not {status}"
    return beginning(got, reference)


# --- at rest ------------------------------------------------------------------------------------


def unrest(statuses: dict[RankId, RankStatus]) -> list[str]:
    """What keeps the ranks from being at rest."""
    words = [f"{rank} does not answer" for rank in RANKS if rank not in statuses]
    for rank, status in statuses.items():
        pages = status.pages
        if not status.load.idle:
            words.append(f"{rank} is not idle: {status.load}")
        if not pages.whole or pages.owned:
            words.append(f"{rank} leaks: {pages}")
        if any(status.handoffs.values()):
            words.append(f"{rank} has rooms: {status.handoffs}")
    return words


async def rest(cluster: Cluster, timeout_s: float = REST_S) -> str:
    """Wait until every page is where it belongs; what is not after that time."""
    words = ["nobody was asked"]
    try:
        async with asyncio.timeout(timeout_s):
            while words := unrest(await cluster.statuses()):  # noqa: ASYNC110 - asked over RPC
                await asyncio.sleep(0.1)
    except TimeoutError:
        return "; ".join(words)
    return ""


async def forgotten(
    cluster: Cluster, prompts: Collection[int], timeout_s: float = REST_S
) -> float | None:
    """Seconds until no rank that answers knows of requests with prompts of these lengths; None
    where it never was so.
    """
    started = cluster.clock.now()
    try:
        async with asyncio.timeout(timeout_s):
            while _known(await cluster.dumps(), prompts):  # noqa: ASYNC110 - asked over RPC
                await asyncio.sleep(0.02)
    except TimeoutError:
        return None
    return cluster.clock.now() - started


def _known(dumps: dict[RankId, RankDump], prompts: Collection[int]) -> bool:
    return any(legs(dumps, prompt) for prompt in prompts)


def dead_connections(cluster: Cluster) -> list[str]:
    """Connections that a rank keeps though their peers have closed them."""
    kept = cluster.half_closed()
    return [f"{life} keeps dead connections to {ends}" for life, ends in kept.items() if ends]


@dataclass
class Descriptors:
    """File descriptors of every life of a rank, always taken at rest."""

    first: dict[Incarnation, int] = field(default_factory=dict)
    worst: int = 0  # growth of any life

    def took(self, counts: dict[Incarnation, int]) -> list[str]:
        """Compare with each life's first count; the problems."""
        words = []
        for life, count in counts.items():
            at_first = self.first.setdefault(life, count)
            self.worst = max(self.worst, count - at_first)
            if count > at_first + IN_USE:
                words.append(f"{life} had {at_first} file descriptors and has {count}")
        return words
