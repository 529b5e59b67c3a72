"""Streams over gRPC, and what each brought: token by token, so that nothing can hide in text."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from core.clock import Clock
from router.rpc.gen import antiphon_pb2 as pb, antiphon_pb2_grpc

VOCAB = 3900


@dataclass(frozen=True)
class Ask:
    """One request. Odd ones sample with a seed, even ones are greedy."""

    name: str
    prompt: tuple[int, ...]
    tokens: int
    seed: int
    n: int = 1

    @classmethod
    def drawn(cls, name: str, seed: int, length: int, tokens: int, n: int = 1) -> Ask:
        draw = random.Random(f"{name} {seed}")
        prompt = tuple(100 + draw.randrange(VOCAB) for _ in range(length))
        return cls(name, prompt, tokens, seed, n)

    def message(self, salt: str, request_id: str) -> pb.GenerateRequest:
        options = pb.GenerationOptions(
            request_id=request_id,
            n=self.n,
            max_tokens=self.tokens,
            temperature=0.8 if self.seed % 2 else 0.0,
            seed=self.seed,
            ignore_eos=True,
            cache_salt=salt,
        )
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=self.prompt), options=options)


@dataclass
class Got:
    """What one stream brought. ``status`` is empty until it has ended."""

    ask: Ask
    tokens: list[list[int]] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)  # of prompt and output
    status: str = ""  # a gRPC status, or LEFT
    words: str = ""
    arrivals: list[float] = field(default_factory=list)  # when messages came
    call: Any = None
    request_id: str = ""  # the caller's; empty: the router gives it one

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.ask.n)]
        self.finish = [0] * self.ask.n

    def take(self, message: pb.GenerateResponse, now: float) -> None:
        self.arrivals.append(now)
        for delta in message.choices:
            self.tokens[delta.index] += delta.token_ids
            self.finish[delta.index] = delta.finish_reason or self.finish[delta.index]
        self.usage = (message.usage.prompt_tokens, message.usage.completion_tokens)

    def leave(self) -> None:
        """What a client does that goes away."""
        self.call.cancel()

    def pause(self, since: float) -> float:
        """Seconds of the longest wait for a message from then on."""
        later = [since, *(at for at in self.arrivals if at > since)]
        return max((b - a for a, b in itertools.pairwise(later)), default=0.0)


class Client:
    """Calls one router."""

    def __init__(self, channel: grpc.aio.Channel, clock: Clock) -> None:
        self._stub = antiphon_pb2_grpc.AntiphonStub(channel)
        self._clock = clock

    async def follow(self, got: Got, salt: str, timeout_s: float | None = None) -> None:
        """Run one stream to its end, whatever that is."""
        message = got.ask.message(salt, got.request_id)
        got.call = self._stub.Generate(message, timeout=timeout_s)
        try:
            async for message in got.call:
                got.take(message, self._clock.now())
            got.status = "OK"
        except grpc.aio.AioRpcError as error:
            got.status, got.words = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            got.status = "LEFT"
            if not got.call.cancelled():
                raise

    async def abort(self, request_id: str) -> bool:
        answer = await self._stub.Abort(pb.AbortRequest(request_id=request_id))
        return bool(answer.found)


@asynccontextmanager
async def client(address: str, clock: Clock) -> AsyncIterator[Client]:
    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Client(channel, clock)
