"""A streaming client of any OpenAI endpoint that time-stamps every chunk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import msgspec

from bench.config import BenchConfig
from bench.outcome import Outcome
from bench.sse import DONE, Chunk, Lines, error_text
from bench.transport import StackTransport
from core.clock import Clock
from core.errors import PreflightError
from core.trust import ASK_FOR_KEY, address, remedy, trusting

Messages = list[dict[str, str]]
_START = "start one with `antiphon serve`, or name another with --url"
_FAILED = ("error", "abort")  # finish reasons that are none


class Request(NamedTuple):
    """What to send, where it belongs, and when it was due (seconds of the clock)."""

    prompt: str | list[int] | Messages
    output_tokens: int
    session: int
    turn: int
    due_s: float


class Access(NamedTuple):
    """What an endpoint may ask for."""

    key: str = ""
    ca: str = ""  # PEM file of the certificate to believe; empty: the usual ones


class _Answer:
    """Collects a stream."""

    def __init__(self) -> None:
        self.chunk_s: list[float] = []
        self.text: list[str] = []
        self.finish: str | None = None
        self.error: str | None = None
        self._decoder = msgspec.json.Decoder(Chunk)
        self._tokens: dict[str, int | None] = {}

    def take(self, payload: bytes, now: float) -> None:
        """Take an event; of the error events the first is kept."""
        try:
            chunk = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            self.error = self.error or f"a chunk that is not OpenAI's: {error}"
            return
        if chunk.error is not None:
            self.error = self.error or error_text(chunk.error)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            self._tokens = {
                "prompt_tokens": chunk.usage.prompt_tokens,
                "completion_tokens": chunk.usage.completion_tokens,
                "cached_tokens": details.cached_tokens if details else None,
            }
        for choice in chunk.choices:
            delta = choice.delta
            text = choice.text or (delta and (delta.content or delta.reasoning_content))
            text = text or (delta and delta.reasoning)
            if text:
                self.chunk_s.append(now)
                self.text.append(text)
            self.finish = choice.finish_reason or self.finish

    def outcome(self, request: Request, start_s: float, end_s: float) -> Outcome:
        """The whole; a stream without a real end is an error."""
        error = self.error
        if error is None and self.finish is None:
            error = "the stream ended without a finish_reason"
        if error is None and self.finish in _FAILED:
            error = f"finish_reason {self.finish}"
        return Outcome(
            session=request.session,
            turn=request.turn,
            due_s=request.due_s,
            start_s=start_s,
            end_s=end_s,
            chunk_s=tuple(self.chunk_s),
            finish=self.finish,
            error=error,
            text="".join(self.text),
            **self._tokens,
        )


class Client:
    """Sends requests for one model over kept-alive connections, as many as are needed."""

    def __init__(self, http: httpx.AsyncClient, config: BenchConfig, clock: Clock) -> None:
        self._http = http
        self._config = config
        self._clock = clock
        self._model = config.model

    @property
    def model(self) -> str:
        return self._model

    async def find_model(self) -> None:
        """Take the first model of /v1/models unless one is named; PreflightError without one."""
        if self._model:
            return
        try:
            answer = await self._http.get("/v1/models")
            if not answer.is_success:
                refusal = await _refusal(answer)
                raise PreflightError(f"{self._config.url}/v1/models answers {refusal}")
            self._model = str(answer.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            fix = remedy(self._config.url, error, _START)
            raise PreflightError(
                f"no OpenAI endpoint answers on {self._config.url} ({_words(error)}): {fix}"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise PreflightError(
                f"{self._config.url}/v1/models names no model: give --model"
            ) from error

    async def send(self, request: Request) -> Outcome:
        """Stream one answer. Never raises for what a server or a network does."""
        answer, lines = _Answer(), Lines()
        body = self._body(request)
        start_s = self._clock.now()
        try:
            async with self._http.stream("POST", self._path, content=body) as response:
                if response.status_code != 200:
                    answer.error = await _refusal(response)
                else:
                    async for data in response.aiter_raw():
                        self._take(answer, lines.feed(data))
                    self._take(answer, lines.close())
        except httpx.HTTPError as error:
            answer.error = answer.error or _words(error)
        return answer.outcome(request, start_s, self._clock.now())

    def _take(self, answer: _Answer, payloads: list[bytes]) -> None:
        now = self._clock.now()
        for payload in payloads:
            if payload and payload != DONE:
                answer.take(payload, now)

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self._config.endpoint == "chat" else "/v1/completions"

    def _body(self, request: Request) -> bytes:
        config = self._config
        body: dict[str, Any] = {
            "model": self._model,
            "messages" if config.endpoint == "chat" else "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | config.extra_body)


@asynccontextmanager
async def connect(config: BenchConfig, clock: Clock, access: Access) -> AsyncIterator[Client]:
    """A client whose connections are closed at the end; ConfigError for a wrong address or file."""
    base = address(config.url.rstrip("/").removesuffix("/v1"))
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if access.key:
        headers["Authorization"] = f"Bearer {access.key}"
    async with httpx.AsyncClient(
        base_url=base,
        headers=headers,
        transport=StackTransport(trusting(access.ca)),
        timeout=config.timeout_s,
    ) as http:
        yield Client(http, config, clock)


async def _refusal(response: httpx.Response) -> str:
    """What a server says when it does not answer with a stream."""
    data = await response.aread()
    try:
        words = error_text(msgspec.json.decode(data))
    except msgspec.DecodeError:
        words = error_text(data.decode("utf-8", "replace"))
    key = ASK_FOR_KEY if response.status_code == httpx.codes.UNAUTHORIZED else ""
    return f"HTTP {response.status_code}: {words or response.reason_phrase}{key}"


def _words(error: Exception) -> str:
    """An error in words; some of httpx's have none but their name."""
    return f"{type(error).__name__}: {error}".rstrip(": ")
