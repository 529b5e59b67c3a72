"""``python -m tests.chaos --minutes N --seed S``: failures in a drawn order under load, checked."""

from __future__ import annotations

import sys

from tests.chaos.cluster import RANKS, host_name
from tests.chaos.hosts import laid_out, on_head
from tests.chaos.run import arguments


def main() -> int:
    arguments()  # a wrong one is said before anything is laid out
    with laid_out([host_name(rank) for rank in RANKS]) as hosts:
        return on_head(hosts, "tests.chaos.run", [*sys.argv[1:], f"--hosts={hosts.words()}"])


if __name__ == "__main__":
    sys.exit(main())
