"""OpenAI bodies <-> the front door's types. Pure functions; one small class per kind of answer."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, Protocol

from core.wire import SamplingParams
from router.openai.logprobs import ChatLogprobs, CompletionLogprobs
from router.openai.schema import ChatBody, CompletionBody, GenerationBody
from router.text.request import ChatPrompt, Prompt, TextEvent, TextRequest, TextUsage

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for plain completions

Json = dict[str, Any]  # opaque: what orjson encodes


def chat_request(body: ChatBody) -> TextRequest:
    """A chat body as the front door takes it."""
    logprobs = bool(body.logprobs)
    prompt = ChatPrompt(
        messages=tuple(body.messages), template_args=body.chat_template_kwargs or {}
    )
    limit = body.max_completion_tokens or body.max_tokens
    sampling = _sampling(body, logprobs, body.top_logprobs or 0)
    return _request(body, "chatcmpl", (prompt,), limit, sampling)


def completion_request(body: CompletionBody) -> TextRequest:
    """A completion body as the front door takes it."""
    limit = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    sampling = _sampling(body, body.logprobs is not None, body.logprobs or 0)
    return _request(body, "cmpl", _prompts(body.prompt), limit, sampling)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    texts = tuple(p for p in prompt if isinstance(p, str))
    id_lists = tuple(tuple(p) for p in prompt if isinstance(p, list))
    single = tuple(p for p in prompt if isinstance(p, int))
    return (single,) if single else texts or id_lists


def _sampling(body: GenerationBody, logprobs: bool, top_logprobs: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=0,  # the front door knows the context
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def _request(
    body: GenerationBody,
    prefix: str,
    prompts: tuple[Prompt, ...],
    limit: int | None,
    sampling: SamplingParams,
) -> TextRequest:
    return TextRequest(
        rid=f"{prefix}-{uuid.uuid4().hex}",
        prompts=prompts,
        n=body.n or 1,
        max_new_tokens=limit,
        sampling=sampling,
        seed=body.seed,
        stops=tuple(body.stop),
        include_stop=body.include_stop_str_in_output or body.no_stop_trim,
        skip_special=body.skip_special_tokens,
    )


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
        choices = [self._choice(of_one) for of_one in _by_choice(events)]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_body(usage),
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

    def __init__(self, request: TextRequest, model: str, created: int) -> None:
        self._head = {
            "id": request.rid,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._asks_logprobs = request.sampling.logprobs
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._top = request.sampling.top_logprobs

    def chunks(self, event: TextEvent) -> Iterable[Json]:
        yield {**self._head, "choices": [self._choice([event])]}

    def usage_chunk(self, usage: TextUsage) -> Json:
        return {**self._head, "choices": [], "usage": usage_body(usage)}

    def whole(self, events: Iterable[TextEvent], usage: TextUsage) -> Json:
        choices = [self._choice(of_one) for of_one in _by_choice(events)]
        return {**self._head, "choices": choices, "usage": usage_body(usage)}

    def _choice(self, events: list[TextEvent]) -> Json:
        index = events[0].index
        logprobs = None
        if self._asks_logprobs:
            entries = self._logprobs.setdefault(index, CompletionLogprobs(self._top))
            logprobs = entries.body([token for event in events for token in event.logprobs])
        return {
            "index": index,
            "text": "".join(event.text for event in events),
            "logprobs": logprobs,
            **_ending(events),
        }


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
