"""Ranks as Ray actors, each replica in a placement group of its own.

Ray is the control plane only: it places, starts and ends processes. Requests, tokens and KV never
pass through it, and the supervisor decides what is started again and when.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import WorkerActor, described_codec
from core.codec import Codec
from core.config import RankSpec, RuntimeConfig
from core.errors import PreflightError, RankLost
from core.wire import RankId, RankInfo

log = logging.getLogger(__name__)

POLL_S = 0.5
SILENCE_S = 5.0  # of Ray: it says nothing about the rank
STOP_S = 5.0
OBJECT_STORE_BYTES = 80 * 2**20  # the least Ray accepts: nothing of ours passes through it
RANK_RESOURCE = "antiphon_rank"
LOCAL_RANKS = 64  # how many ranks our own Ray on one machine may have


class RayLauncher:
    """Implements Launcher. Made and used on one event loop."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._local = config.address == "local"
        self._actors: dict[RankId, Any] = {}  # opaque: Ray actor handles
        self._groups: dict[RankId, PlacementGroup] = {}

    async def open(self) -> None:
        """Start Ray on this machine, or join the cluster at the configured address."""
        options: dict[str, Any] = {}  # opaque: of ray.init
        if self._local:
            options = {
                # Ray starts an idle process for each CPU it has; ranks count by a resource of
                # their own, so that as many as are wanted fit without them.
                "num_cpus": 1,
                "resources": {RANK_RESOURCE: LOCAL_RANKS},
                "num_gpus": 0,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_system_config": {"worker_niceness": 0},  # 15 would starve ranks on a busy machine
            }
        terminate = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=self._config.address, logging_level=logging.ERROR, **options)
        except Exception as error:
            words = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise PreflightError(
                f"Ray did not start: {words} Try again when the machine is less busy, or run"
                " without Ray: cluster.runtime=process"
            ) from error
        signal.signal(signal.SIGTERM, terminate)  # Ray's own handler would exit on the spot

    async def start(self, spec: RankSpec) -> RankInfo:
        """See Launcher."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._place(spec)
                return await self._describe(spec.rank)
        except TimeoutError:
            await self.stop(spec.rank)
            raise PreflightError(
                f"not ready after {self._config.start_timeout_s:g} s: Ray may have no place for it"
                " (add nodes, or lower replicas or threads), or raise cluster.start_timeout_s"
            ) from None
        except RayActorError as error:
            await self.stop(spec.rank)
            raise RankLost(f"died while it started: {_first_line(error)}") from error
        except (asyncio.CancelledError, PreflightError):
            await self.stop(spec.rank)
            raise

    async def gone(self, rank: RankId) -> str:
        """Ask now and then; a Ray that does not answer proves nothing."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._actors[rank].alive.remote()
            except TimeoutError:
                log.info("Ray is silent about %s", rank)
            except RayActorError as error:
                self._release(rank)
                return _first_line(error)

    async def stop(self, rank: RankId) -> None:
        """See Launcher."""
        actor = self._actors.get(rank)
        if actor is None:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await actor.stop.remote()
        except (RayActorError, TimeoutError) as error:
            log.info("rank %s did not stop by itself: %s", rank, error)
        ray.kill(actor, no_restart=True)
        self._release(rank)

    async def kill(self, rank: RankId) -> None:
        """See Launcher. A process that does not end within 5 s gets SIGKILL from Ray, which keeps
        its resources until then.
        """
        if actor := self._actors.get(rank):
            ray.kill(actor, no_restart=True)
            self._release(rank)

    async def close(self) -> None:
        """End Ray, or leave the cluster that was there before."""
        ray.shutdown()

    async def _place(self, spec: RankSpec) -> None:
        if spec.rank in self._groups:  # its last life did not end by our hand
            self._release(spec.rank)
        bundle = {RANK_RESOURCE: 1.0} if self._local else {"CPU": float(spec.group.threads)}
        group = self._groups[spec.rank] = placement_group([bundle], strategy="PACK")
        await group.ready()
        self._actors[spec.rank] = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=0 if self._local else spec.group.threads,
                resources={RANK_RESOURCE: 1} if self._local else {},
                max_restarts=0,
                max_concurrency=3,  # `stop` and `alive` must not wait for weights to load
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
            )
            .remote(Codec[RankSpec](RankSpec).encode(spec))
        )

    async def _describe(self, rank: RankId) -> RankInfo:
        described = described_codec().decode(await self._actors[rank].describe.remote())
        if described.info is None:
            raise PreflightError(described.problem)
        return described.info

    def _release(self, rank: RankId) -> None:
        self._actors.pop(rank, None)
        if group := self._groups.pop(rank, None):
            remove_placement_group(group)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
