"""Cluster on Ray: one actor per rank in a placement group, watched and restarted.

Ray is the control plane only. A lost Ray head stops restarts and scaling; it does not stop
serving, because the router's sessions go to the ranks directly.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import WorkerActor, described_codec
from core.codec import Codec
from core.config import RankSpec, RuntimeConfig
from core.errors import PreflightError
from core.wire import RankInfo

log = logging.getLogger(__name__)

POLL_S = 0.5
SILENCE_S = 60.0  # a restarting actor takes seconds to describe itself
OBJECT_STORE_BYTES = 80 * 2**20  # the least Ray accepts: nothing of ours passes through it

OnMembers = Callable[[Sequence[RankInfo]], None]


class RayCluster:
    """Starts ranks, says who is there, stops everything. All methods run on one event loop."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._local = config.address == "local"
        self._group: PlacementGroup | None = None
        self._actors: dict[int, Any] = {}  # opaque: Ray actor handles, by index of the spec
        self._there: dict[int, RankInfo] = {}

    async def start(self, specs: Sequence[RankSpec]) -> list[RankInfo]:
        """Start Ray and every rank; returns when all of them can take requests.

        Raises PreflightError with the rank's own words when one cannot start.
        """
        self._connect(len(specs))
        bundles = [{"CPU": float(self._cpus(spec))} for spec in specs]
        self._group = placement_group(bundles, strategy="PACK")
        timeout_s = self._config.start_timeout_s
        if not await asyncio.to_thread(self._group.wait, timeout_s):
            raise PreflightError(
                "Ray has no place for all ranks: add nodes, or lower replicas or threads"
            )
        for index, spec in enumerate(specs):
            self._actors[index] = self._place(index, spec)
        try:
            async with asyncio.timeout(timeout_s):
                infos = await asyncio.gather(*(self._describe(i) for i in self._actors))
        except TimeoutError:
            raise PreflightError(
                f"the ranks were not ready after {timeout_s:g} s: raise cluster.start_timeout_s"
            ) from None
        except RayActorError as error:
            raise PreflightError(f"a rank died while it started: {error}") from error
        self._there = dict(enumerate(infos))
        return infos

    async def watch(self, on_members: OnMembers) -> None:
        """Report who is there, whenever that changes, until cancelled."""
        on_members(list(self._there.values()))
        async with asyncio.TaskGroup() as tasks:
            for index in self._actors:
                tasks.create_task(self._watch(index, on_members))

    async def stop(self) -> None:
        """Stop ranks in order (decode before the prefill it listens to), then Ray."""
        for index in reversed(self._actors):
            try:
                async with asyncio.timeout(5):
                    await self._actors[index].stop.remote()
            except (RayActorError, TimeoutError) as error:
                log.info("rank %d did not stop by itself: %s", index, error)
            ray.kill(self._actors[index], no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    def _connect(self, ranks: int) -> None:
        options: dict[str, Any] = {}  # opaque: of ray.init
        if self._local:
            options = {
                "num_cpus": ranks,
                "num_gpus": 0,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_system_config": {"worker_niceness": 0},  # 15 would starve ranks on a busy machine
            }
        terminate = signal.getsignal(signal.SIGTERM)
        ray.init(address=self._config.address, logging_level=logging.ERROR, **options)
        signal.signal(signal.SIGTERM, terminate)  # Ray's own handler would exit on the spot

    def _cpus(self, spec: RankSpec) -> int:
        """What a rank takes of a node. Our own Ray has one CPU for each rank.

        It starts a process for each CPU, at once and beside the rest of its start; those that no
        actor takes it ends again, and some crash as they end.
        """
        return 1 if self._local else spec.group.threads

    def _place(self, index: int, spec: RankSpec) -> Any:  # opaque: a Ray actor handle
        assert self._group is not None
        actor = ray.remote(WorkerActor)
        return actor.options(
            name=f"antiphon/{spec.rank}",
            num_cpus=self._cpus(spec),
            max_restarts=-1,
            max_concurrency=2,  # `stop` must not wait for a `describe` that loads weights
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=index
            ),
        ).remote(Codec[RankSpec](RankSpec).encode(spec))

    async def _describe(self, index: int) -> RankInfo:
        described = described_codec().decode(await self._actors[index].describe.remote())
        if described.info is None:
            raise PreflightError(described.problem)
        return described.info

    async def _watch(self, index: int, on_members: OnMembers) -> None:
        """Follow one actor through its lives."""
        while True:
            info: RankInfo | None = None
            try:
                async with asyncio.timeout(SILENCE_S):
                    info = await self._describe(index)
            except TimeoutError:
                info = self._there.get(index)  # Ray's silence says nothing about the rank
            except RayActorError as error:
                log.warning("rank %s is gone: %s", index, str(error).splitlines()[0])
            except PreflightError as error:
                log.error("rank %s cannot start again: %s", index, error)
            if info != self._there.get(index):
                self._there.pop(index, None)
                if info is not None:
                    self._there[index] = info
                on_members(list(self._there.values()))
            await asyncio.sleep(POLL_S)
