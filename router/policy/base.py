"""Policy: which rank of one role gets a request. Pure: no I/O, no clock, no awaits.

The dispatcher asks and books the answer without giving up the event loop in between, so two
requests never decide on the same numbers. Each role has its own policy object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from core.registry import Entry, Registry
from core.wire import Int32Array, LoadReport, RankId


class Candidate(Protocol):
    """A rank that can take the request now, and what is known of its work."""

    @property
    def rank(self) -> RankId: ...

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


class Policy(Protocol):
    """May keep state of its own, such as whose turn it is."""

    def choose(self, candidates: Sequence[C], token_ids: Int32Array) -> C:
        """One of ``candidates``, which is not empty, for a prompt of ``token_ids``."""
        ...


POLICIES: Registry[Any] = Registry(  # opaque: factories of Policy, called without arguments
    "routing policy",
    {
        "round_robin": Entry("router.policy.round_robin:RoundRobin"),
        "least_load": Entry("router.policy.least_load:LeastLoad"),
    },
)
