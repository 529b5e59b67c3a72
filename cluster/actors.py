"""WorkerActor: one rank as a Ray actor. Ray places, starts and ends it; nothing else.

Requests, tokens and KV never pass through Ray: the rank listens on a gRPC port of its own. A plain
process can own one as well (cluster/rank_process.py): nothing here knows Ray.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from core import env, log
from core.codec import Codec
from core.config import RankSpec
from core.errors import OperatorError
from core.wire import RankInfo

if TYPE_CHECKING:
    from worker.host import OpenTransport, RankHost

T = TypeVar("T")


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor says of itself: its rank's info, or why there is no rank."""

    info: RankInfo | None = None
    problem: str = ""


def described_codec() -> Codec[Described]:
    """Between the actor and the driver; Ray only carries the bytes."""
    return Codec(Described)


class WorkerActor:
    """Starts its rank at the first ``describe``. A dead step loop ends the process."""

    def __init__(self, spec: bytes, transport: OpenTransport | None = None) -> None:
        """``transport`` overrides the configured one, for tests."""
        self._spec = Codec[RankSpec](RankSpec).decode(spec)
        self._transport = transport
        log.setup(str(self._spec.rank), self._spec.log_level, style=self._spec.log_format)
        self._host: RankHost | None = None
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
        """End sessions and links in order; the actor is killed afterwards."""
        if self._host is not None:
            self._run(self._host.stop())

    async def _start(self) -> RankHost:
        for name, value in _environment(self._spec).items():
            env.assign(name, value)
        # Here and not above: torch reads the environment as it loads, and the driver needs none.
        from worker.host import RankHost

        return await RankHost.start(self._spec, on_crash=_die, transport=self._transport)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _environment(spec: RankSpec) -> dict[str, str]:
    """What torch's libraries read.

    Ray has set OMP_NUM_THREADS from num_cpus. libgomp's threads spin while they wait, which
    costs a second rank on the same cores a factor of ten: let them sleep early.
    """
    threads = str(spec.group.threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GOMP_SPINCOUNT": "1000"}


def _die() -> None:
    os._exit(1)
