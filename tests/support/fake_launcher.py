"""A launcher without processes, whose ranks start, die and refuse as a test says."""

from __future__ import annotations

import asyncio

from core import wire
from core.config import DisaggConfig, GroupConfig, RankSpec
from core.errors import ModelError
from core.wire import RankId, RankInfo, Role


def plan(rank: RankId) -> RankSpec:
    return RankSpec(
        rank=rank,
        role=Role(rank.group),
        folder="/nowhere",
        served_name="m",
        dtype="float32",
        context_len=16,
        host="127.0.0.1",
        group=GroupConfig(),
        disagg=DisaggConfig(),
    )


class FakeLauncher:
    def __init__(self) -> None:
        self.lives = 0
        self.up: dict[RankId, asyncio.Future[str]] = {}
        self.refuse: dict[RankId, str] = {}
        self.hold: asyncio.Event | None = None  # starts wait for it
        self.stopped: list[RankId] = []
        self.killed: list[RankId] = []

    async def open(self) -> None:
        pass

    async def start(self, spec: RankSpec) -> RankInfo:
        if self.hold is not None:
            await self.hold.wait()
        if words := self.refuse.get(spec.rank):
            raise ModelError(words)
        assert spec.rank not in self.up, "two lives of one rank"
        self.lives += 1
        self.up[spec.rank] = asyncio.get_running_loop().create_future()
        incarnation = wire.Incarnation(
            rank=spec.rank, endpoint=f"127.0.0.1:{self.lives}", nonce=f"n{self.lives}"
        )
        return RankInfo(
            incarnation=incarnation,
            role=spec.role,
            model="m",
            context_len=16,
            total_pages=16,
            page_size=1,
            kv_bytes_per_token=1,
            dtype="float32",
            attention="torch",
            threads=1,
            pid=self.lives,
        )

    def die(self, rank: RankId) -> None:
        self.up.pop(rank).set_result("killed")

    async def gone(self, rank: RankId) -> str:
        return await asyncio.shield(self.up[rank])

    async def stop(self, rank: RankId) -> None:
        self.stopped.append(rank)
        if life := self.up.pop(rank, None):
            life.set_result("stopped")
            for _ in range(8):  # whoever waits for its end hears of it first
                await asyncio.sleep(0)

    async def kill(self, rank: RankId) -> None:
        self.killed.append(rank)
        await self.stop(rank)

    async def close(self) -> None:
        pass
