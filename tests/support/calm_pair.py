"""The prefill and decode engines of pd_world on a network without trouble, settled at will."""

from __future__ import annotations

from core.rpc.events import Submitted
from core.wire import Route, TokenChunk, TokenRequest
from tests.support.pd_world import DECODE, PREFILL, Asked, PdWorld
from tests.support.requests import request
from worker.engine import Engine
from worker.roles.local_prefill import Mode


class CalmPair(PdWorld):
    """``settle`` lets everything that is under way arrive."""

    def __init__(self, seed: int = 0, local: Mode = "off", page_size: int = 1) -> None:
        super().__init__(seed, local=local, overlap=False, page_size=page_size)
        self.chunks: dict[str, list[TokenChunk]] = {"prefill": [], "decode": []}

    def ask(
        self, rid: str, prompt: list[int], count: int, room: int, **params: object
    ) -> TokenRequest:
        """A request, not yet sent to anybody."""
        self.asked.setdefault(rid, Asked(prompt, count, "a"))
        route = Route(room=room, prefill=PREFILL, decode=DECODE)
        return request(rid, prompt, count, route=route, **params)

    def send(self, wanted: TokenRequest, *engines: Engine) -> None:
        for engine in engines or (self.prefill, self.decode):
            engine.handle(Submitted("a", wanted))

    def step(self, engine: Engine, count: int = 1) -> None:
        for _ in range(count):
            self._step(engine, "prefill" if engine is self.prefill else "decode")

    def settle(self, rounds: int = 60) -> None:
        for _ in range(rounds):
            self.step(self.prefill)
            while self.jobs:
                self._run_job()
            while self.to_prefill or self.to_decode:
                self._hear()
            self.step(self.decode)

    def of(self, leg: str, rid: str) -> list[TokenChunk]:
        return [chunk for chunk in self.chunks[leg] if chunk.rid == rid]

    def _heard(self, asked: Asked, router: str, leg: str, chunk: TokenChunk) -> None:
        self.chunks[leg].append(chunk)
        if chunk.error is None:
            super()._heard(asked, router, leg, chunk)
