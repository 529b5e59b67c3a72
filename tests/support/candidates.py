"""Ranks that policies choose among, without sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.wire import Incarnation, LoadReport, RankId
from tests.support.wires import incarnation


@dataclass(eq=False)
class Rank:
    """A Candidate whose numbers the test sets."""

    number: int
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    load: LoadReport = field(default_factory=LoadReport)
    capacity_tokens: int = 1 << 20
    nonce: str = "n0"

    @property
    def rank(self) -> RankId:
        return RankId(group="decode", replica=self.number)

    @property
    def incarnation(self) -> Incarnation:
        return incarnation("decode", self.number, nonce=self.nonce)
