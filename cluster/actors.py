"""WorkerActor: one rank as a Ray actor. Ray places, starts and ends it; nothing else.

Requests, tokens and KV never pass through Ray: the rank listens on a gRPC port of its own. A plain
process can own one as well (cluster/rank_process.py): nothing here knows Ray.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from core import env, log
from core.clock import RealClock
from core.codec import Codec
from core.config import RankSpec
from core.errors import OperatorError
from core.wire import RankInfo

if TYPE_CHECKING:
    from worker.host import OpenTransport, RankHost
    from worker.lifeline import Lifeline

T = TypeVar("T")

CRASHED = 1  # exit code of a rank whose step loop died
ORPHANED = 3  # of one whose lease nobody renewed
STOP_S = 5.0  # to end in order


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor says of itself: its rank's info, or why there is no rank."""

    info: RankInfo | None = None
    problem: str = ""


def described_codec() -> Codec[Described]:
    """Between the actor and the driver; Ray only carries the bytes."""
    return Codec(Described)


class WorkerActor:
    """Starts its rank at the first ``describe``.

    A dead step loop ends the process (CRASHED), and so does a lease that nobody renews (ORPHANED).
    """

    def __init__(self, spec: bytes, transport: OpenTransport | None = None) -> None:
        """``transport`` overrides the configured one, for tests."""
        self._spec = Codec[RankSpec](RankSpec).decode(spec)
        self._transport = transport
        log.setup(str(self._spec.rank), self._spec.log_level, style=self._spec.log_format)
        self._host: RankHost | None = None
        self._lifeline: Lifeline | None = None
        self._problem = ""
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="grpc-loop", daemon=True).start()

    def describe(self) -> bytes:
        """The rank's info; starts the rank when there is none. Takes seconds the first time."""
        with self._lock:
            if self._host is None and not self._problem:
                try:
                    self._host = self._run(self._start())
                except OperatorError as error:
                    self._problem = str(error)
        info = self._host.info if self._host is not None else None
        return described_codec().encode(Described(info=info, problem=self._problem))

    def alive(self) -> None:
        """Answers while the process lives."""

    def stop(self) -> None:
        """End sessions and links in order, or give up after STOP_S; the process ends afterwards."""
        if self._lifeline is not None:
            self._lifeline.stop()
        self._end_in_order()

    def _end_in_order(self) -> None:
        if self._host is not None:
            with suppress(TimeoutError):
                self._run(self._host.stop(), STOP_S)

    def _orphaned(self) -> None:
        self._end_in_order()
        os._exit(ORPHANED)

    async def _start(self) -> RankHost:
        for name, value in _environment(self._spec).items():
            env.assign(name, value)
        # Here and not above: torch reads the environment as it loads, and the driver needs none.
        from worker.host import RankHost
        from worker.lifeline import Lifeline

        lease = self._spec.lease
        self._lifeline = lifeline = Lifeline(lease.orphan_s, RealClock(), self._orphaned)
        host = await RankHost.start(
            self._spec, on_crash=_die, transport=self._transport, on_renewal=lifeline.renewed
        )
        lifeline.start()
        return host

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)


def _environment(spec: RankSpec) -> dict[str, str]:
    """What torch's libraries read.

    Ray has set OMP_NUM_THREADS from num_cpus. libgomp's threads spin while they wait, which
    costs a second rank on the same cores a factor of ten: let them sleep early.
    """
    threads = str(spec.group.threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GOMP_SPINCOUNT": "1000"}


def _die() -> None:
    os._exit(CRASHED)
