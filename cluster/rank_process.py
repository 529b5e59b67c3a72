"""One rank as a process of its own: ``python -m cluster.rank_process``, run by ProcessLauncher.

stdin brings the rank's spec; its end, also because the parent has died, is the order to stop, at
any time. stdout says once who the rank is, or why there is none.

Exit codes: 0 as it was told, 1 its step loop died (``CRASHED``), 3 nobody renewed its lease
(``ORPHANED``, both in cluster/actors.py).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from cluster.actors import WorkerActor

LENGTH_BYTES = 4  # big-endian, before each frame


def framed(data: bytes) -> bytes:
    """With its length in front."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def main(actor: Callable[[bytes], WorkerActor] = WorkerActor) -> None:
    """Run one rank until stdin ends. Does not return: threads of libraries would keep us."""
    out = _answers()
    size = int.from_bytes(_exactly(LENGTH_BYTES), "big")
    rank = actor(_exactly(size))
    ending = threading.Thread(target=_end_with_stdin, args=(rank,), name="stdin", daemon=True)
    ending.start()
    with suppress(BrokenPipeError), out:
        out.write(framed(rank.describe()))
    ending.join()


def _end_with_stdin(rank: WorkerActor) -> None:
    """In a thread, because nobody may be there any more while the rank still loads."""
    sys.stdin.buffer.read()
    rank.stop()
    os._exit(0)


def _answers() -> BinaryIO:
    """stdout for us alone: what libraries print goes to stderr."""
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return own


def _exactly(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        sys.exit("a rank gets its spec on stdin: it is started by `antiphon serve`")
    return data


if __name__ == "__main__":
    main()
