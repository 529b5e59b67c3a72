"""A real model behind a real engine, stepped by hand: no threads, sockets or clock."""

from __future__ import annotations

from pathlib import Path

from core.config import DisaggConfig, GroupConfig, RankSpec
from core.rpc.events import Submitted
from core.wire import Incarnation, RankId, Role, TokenChunk
from tests.support.requests import request
from worker.build import build
from worker.engine import Engine


class NoWiring:
    """A unified rank has no peers."""

    def dial(self, target: Incarnation) -> str:
        raise AssertionError(target)

    def send(self, peer: str, data: bytes) -> None:
        raise AssertionError(peer)

    def drop(self, peer: str) -> None:
        raise AssertionError(peer)

    def wake(self) -> None:
        """Nothing sleeps here."""


def rank_spec(
    folder: Path, *, dtype: str = "float32", role: Role = Role.UNIFIED, **group
) -> RankSpec:
    settings = {"threads": 1, "kv_tokens": 4096, "kv_memory_mib": 1, **group}
    return RankSpec(
        rank=RankId(group=role.value),
        role=role,
        folder=str(folder),
        served_name="m",
        dtype=dtype,
        context_len=2048,
        host="127.0.0.1",
        group=GroupConfig(**settings),
        disagg=DisaggConfig(),
    )


def unified_engine(folder: Path, **options) -> Engine:
    return build(rank_spec(folder, **options), NoWiring()).engine


def generate(
    engine: Engine, prompts: list[list[int]], max_new: int, **params
) -> list[list[TokenChunk]]:
    """Submit all at once and step until every stream has ended; the chunks of each."""
    chunks: dict[str, list[TokenChunk]] = {}
    for i, ids in enumerate(prompts):
        chunks[f"r{i}"] = []
        engine.handle(Submitted("router", request(f"r{i}", ids, max_new, **params)))
    for _ in range(100_000):
        for report in engine.step(0.0).values():
            for chunk in report.chunks:
                chunks[chunk.rid].append(chunk)
        if engine.idle:
            break
    engine.scheduler.cache.check()
    return list(chunks.values())


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]
