"""The front door's events -> OpenAI answers, whole or in chunks. One small class per kind."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from router.openai.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from router.openai.schema import CompletionBody
from router.text.request import PromptText, TextEvent, TextRequest, TextUsage

Json = dict[str, Any]  # opaque: what orjson encodes


def usage_body(usage: TextUsage) -> Json:
    """The ``usage`` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


class Answer(Protocol):
    """How one kind of answer is written, as chunks of a stream or whole."""

    def chunks(self, event: TextEvent) -> Iterable[Json]:
        """The chunks that say what the event says."""
        ...

    def usage_chunk(self, usage: TextUsage) -> Json: ...

    def whole(self, events: Iterable[TextEvent], usage: TextUsage) -> Json:
        """The answer without streaming, from all events."""
        ...


class ChatAnswer:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, request: TextRequest, model: str, created: int) -> None:
        self._head = {"id": request.rid, "created": created, "model": model}
        self._logprobs = ChatLogprobs(request.sampling.top_logprobs)
        self._asks_logprobs = request.sampling.logprobs
        self._scores = request.sampling.prompt_logprobs
        self._begun: set[int] = set()  # choices whose role was sent

    def chunks(self, event: TextEvent) -> Iterable[Json]:
        if event.index not in self._begun:
            self._begun.add(event.index)
            yield self._chunk(event.index, {"role": "assistant", "content": ""})
        choice = self._chunk(event.index, {"content": event.text} if event.text else {})
        if self._asks_logprobs:
            choice["choices"][0]["logprobs"] = {"content": self._logprobs.content(event)}
        if event.finish is not None:
            choice["choices"][0]["finish_reason"] = event.finish.value
            choice["choices"][0]["matched_stop"] = event.matched_stop
        yield choice

    def _chunk(self, index: int, delta: Json) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, usage: TextUsage) -> Json:
        return {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": usage_body(usage),
        }

    def whole(self, events: Iterable[TextEvent], usage: TextUsage) -> Json:
        groups = _by_choice(events)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(of_one) for of_one in groups],
            "usage": usage_body(usage),
            **_scored(groups[0][0].prompt, self._scores),
        }

    def _choice(self, events: list[TextEvent]) -> Json:
        content = [entry for event in events for entry in self._logprobs.content(event)]
        return {
            "index": events[0].index,
            "message": {
                "role": "assistant",
                "content": "".join(event.text for event in events),
                "refusal": None,
            },
            "logprobs": {"content": content, "refusal": None} if self._asks_logprobs else None,
            **_ending(events),
        }


class CompletionAnswer:
    """text_completion, streamed or not."""

    def __init__(
        self, body: CompletionBody, request: TextRequest, model: str, created: int
    ) -> None:
        self._head = {
            "id": request.rid,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(body.logprobs)
        self._scores = body.prompt_logprobs
        self._echo = request.echo
        self._runs, self._keeps = request.n, body.n or 1

    def chunks(self, event: TextEvent) -> Iterable[Json]:
        if self._echo and event.prompt is not None:  # goes first, in a chunk of its own
            yield self._chunk(TextEvent(index=event.index, prompt=event.prompt))
            event = msgspec.structs.replace(event, prompt=None)
        yield self._chunk(event)

    def _chunk(self, event: TextEvent) -> Json:
        return {**self._head, "choices": [self._choice(event.index, [event])]}

    def usage_chunk(self, usage: TextUsage) -> Json:
        return {**self._head, "choices": [], "usage": usage_body(usage)}

    def whole(self, events: Iterable[TextEvent], usage: TextUsage) -> Json:
        best = _best(_by_choice(events), self._runs, self._keeps)
        choices = [self._choice(index, of_one) for index, of_one in enumerate(best)]
        return {**self._head, "choices": choices, "usage": usage_body(usage)}

    def _choice(self, index: int, events: list[TextEvent]) -> Json:
        prompt = events[0].prompt
        echoed = prompt if self._echo else None
        text = "".join(event.text for event in events)
        logprobs = None
        if self._logprobs is not None:
            tokens = [token for event in events for token in event.logprobs]
            logprobs = (
                self._logprobs.body(tokens)
                if echoed is None
                else self._logprobs.body([*echoed.rest, *tokens], echoed.first)
            )
        return {
            "index": index,
            "text": text if echoed is None else echoed.text + text,
            "logprobs": logprobs,
            **_ending(events),
            **_scored(prompt, self._scores),
        }


def _scored(prompt: PromptText | None, top: int | None) -> Json:
    """The field for the scores of a prompt, where they were asked for."""
    if prompt is None or top is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(prompt, top)}


def _best(groups: list[list[TextEvent]], runs: int, keeps: int) -> list[list[TextEvent]]:
    """Of each prompt's ``runs`` choices the ``keeps`` most likely per token, best first."""
    if runs == keeps:
        return groups
    prompts = (groups[at : at + runs] for at in range(0, len(groups), runs))
    return [
        events
        for choices in prompts
        for events in sorted(choices, key=_mean_logprob, reverse=True)[:keeps]
    ]


def _mean_logprob(events: list[TextEvent]) -> float:
    logprobs = [token.logprob for event in events for token in event.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _ending(events: list[TextEvent]) -> Json:
    last = events[-1]
    if last.finish is None:
        return {"finish_reason": None}
    return {"finish_reason": last.finish.value, "matched_stop": last.matched_stop}


def _by_choice(events: Iterable[TextEvent]) -> list[list[TextEvent]]:
    """The events of each choice, in the order of the choices."""
    grouped: dict[int, list[TextEvent]] = {}
    for event in events:
        grouped.setdefault(event.index, []).append(event)
    return [grouped[index] for index in sorted(grouped)]
