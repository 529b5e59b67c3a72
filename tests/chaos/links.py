"""Links that fail: cut, cut in one direction, and lossy."""

from __future__ import annotations

import asyncio

from core.wire import RankId
from tests.chaos.cluster import host_name
from tests.chaos.hosts import HEAD
from tests.chaos.scene import AWAY_S, Fire, Scene


def cut_off(group: str) -> Fire:
    async def fire(scene: Scene) -> None:
        rank = scene.victim(group)
        scene.cluster.cut(rank)
        try:
            scene.cluster.writes(None)
            await scene.silence(rank)
        finally:
            scene.cluster.heal(rank)

    return fire


def deaf(source: str, target: str) -> Fire:
    """What one rank of the request sends to the other is lost, and only that."""

    async def fire(scene: Scene) -> None:
        names = host_name(scene.victim(source)), host_name(scene.victim(target))
        scene.cluster.hosts.deafen(*names)
        try:
            scene.cluster.writes(None)
            await scene.silence(scene.victim("prefill"), session=False)
        finally:
            scene.cluster.hosts.undeafen(*names)

    return fire


async def deaf_to_router(scene: Scene) -> None:
    """A rank hears nothing of the first router and its supervisor, who hear it."""
    rank = scene.victim(scene.role)
    await _deaf(scene, rank, HEAD, host_name(rank))


async def unheard_by_router(scene: Scene) -> None:
    """The first router and its supervisor hear nothing of a rank, which hears them."""
    rank = scene.victim(scene.role)
    await _deaf(scene, rank, host_name(rank), HEAD)


async def _deaf(scene: Scene, rank: RankId, source: str, target: str) -> None:
    scene.cluster.frozen.add(rank)
    scene.cluster.hosts.deafen(source, target)
    try:
        scene.cluster.writes(None)
        await scene.silence(rank)
    finally:
        scene.cluster.hosts.undeafen(source, target)
        scene.cluster.frozen.discard(rank)


async def lossy(scene: Scene) -> None:
    """Everything a rank sends and gets is slower, nothing else."""
    name = host_name(scene.victim(scene.role))
    scene.cluster.hosts.wear(name)
    try:
        scene.cluster.writes(None)
        await asyncio.sleep(AWAY_S)
    finally:
        scene.cluster.hosts.mend(name)
