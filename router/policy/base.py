"""Policy: which rank of one role gets a request. No I/O, no awaits, time from a Clock.

The dispatcher asks ``assign`` and books the answer without giving up the event loop in between,
so two requests never decide on the same numbers. Each role has its own policy object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from core.clock import Clock
from core.config import CacheAwareConfig
from core.metrics import MetricSink
from core.registry import Entry, Registry
from core.wire import Incarnation, Int32Array, LoadReport, RankId


class Candidate(Protocol):
    """A rank that can take the request now, and what is known of its work."""

    @property
    def rank(self) -> RankId: ...

    @property
    def incarnation(self) -> Incarnation: ...

    @property
    def capacity_tokens(self) -> int:
        """Size of its KV pool."""
        ...

    @property
    def load(self) -> LoadReport:
        """The rank's own latest report: late by a step and a network."""
        ...

    @property
    def outstanding_tokens(self) -> int:
        """Booked by this router and not yet released: never late, blind to other routers."""
        ...

    @property
    def outstanding_requests(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class Ticket(Protocol):
    """What a policy remembers of one assigned request."""

    @property
    def expected_tokens(self) -> int | None:
        """Of the prompt, thought to be in the rank's cache; None where the policy has no idea."""
        ...

    def started(self, cached_tokens: int | None) -> None:
        """The first token came: the prompt is computed. ``cached_tokens`` of it were found in the
        rank's cache, None where that is not known. At most once, before ``ended``.
        """
        ...

    def ended(self, token_ids: Int32Array | None) -> None:
        """The rank is rid of the request; exactly once, on every way out.

        ``token_ids`` are the prompt and the output the rank has computed, None where it computed
        nothing after the prompt.
        """
        ...


class Forgotten:
    """The ticket of a policy that remembers nothing."""

    @property
    def expected_tokens(self) -> int | None:
        return None

    def started(self, cached_tokens: int | None) -> None:
        pass

    def ended(self, token_ids: Int32Array | None) -> None:
        pass


class Policy(Protocol):
    """May keep state of its own, such as whose turn it is or who holds which prefix."""

    def assign(
        self, candidates: Sequence[C], token_ids: Int32Array, cache_salt: str = ""
    ) -> tuple[C, Ticket]:
        """One of ``candidates``, which is not empty, for a prompt of ``token_ids``.

        A prefix is of use only to requests of its own ``cache_salt``.
        """
        ...

    def forget(self, life: Incarnation) -> None:
        """This life of a rank is over, and its cache with it; tickets of it may still end."""
        ...


class PolicyContext(NamedTuple):
    """What a policy may use."""

    config: CacheAwareConfig
    clock: Clock
    sink: MetricSink


class Policies(NamedTuple):
    """One policy for each half of a route; unified ranks are chosen by the first."""

    prefill: Policy
    decode: Policy


POLICIES: Registry[Policies] = Registry(  # factories: Callable[[PolicyContext], Policies]
    "routing policy",
    {
        "cache_aware": Entry("router.policy.cache_aware:make", needs=("xxhash",)),
        "least_load": Entry("router.policy.least_load:make"),
        "round_robin": Entry("router.policy.round_robin:make"),
    },
)
