"""What every front says to "can requests be served now?"."""

from __future__ import annotations

import msgspec


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests can be served now, and why not."""

    ready: bool
    reason: str = ""  # for operators: it names ranks
    told: str = "not every worker is there"  # the same for everybody
