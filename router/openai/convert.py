"""OpenAI request bodies -> the front door's types. Pure functions."""

from __future__ import annotations

import uuid

import msgspec

from core.errors import RequestError
from core.wire import SamplingParams
from router.openai.schema import ChatBody, CompletionBody, GenerationBody
from router.text.request import ChatPrompt, Prompt, TextRequest

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for plain completions


def chat_request(body: ChatBody, caller: str = "") -> TextRequest:
    """A chat body as the front door takes it."""
    logprobs = bool(body.logprobs)
    prompt = ChatPrompt(
        messages=tuple(body.messages), template_args=body.chat_template_kwargs or {}
    )
    limit = body.max_completion_tokens or body.max_tokens
    sampling = _sampling(body, logprobs, body.top_logprobs or 0)
    request = _request(body, "chatcmpl", (prompt,), limit, sampling)
    return msgspec.structs.replace(request, caller=caller)


def completion_request(body: CompletionBody, caller: str = "") -> TextRequest:
    """A completion body as the front door takes it; raises RequestError."""
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    runs = _runs(body)
    ranks = runs > (body.n or 1)
    sampling = _sampling(body, body.logprobs is not None or ranks, body.logprobs or 0)
    if body.echo and body.logprobs is not None:
        top = max(body.logprobs, body.prompt_logprobs or 0)
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=top)
    request = _request(body, "cmpl", _prompts(body.prompt), limit, sampling)
    return msgspec.structs.replace(request, n=runs, echo=bool(body.echo), caller=caller)


def _runs(body: CompletionBody) -> int:
    """How many choices of each prompt are generated; the best ``n`` of them are the answer."""
    n = body.n or 1
    runs = body.best_of or n
    if runs < n:
        raise RequestError(f"best_of is {runs}: it must be at least n, {n}", param="best_of")
    if runs > n and body.stream:
        raise RequestError("best_of cannot be streamed: the best is known last", param="best_of")
    return runs


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    texts = tuple(p for p in prompt if isinstance(p, str))
    id_lists = tuple(tuple(p) for p in prompt if isinstance(p, list))
    single = tuple(p for p in prompt if isinstance(p, int))
    return (single,) if single else texts or id_lists


def _sampling(body: GenerationBody, logprobs: bool, top_logprobs: int) -> SamplingParams:
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not available in a stream", param="prompt_logprobs")
    return SamplingParams(
        max_new_tokens=0,  # the front door knows the context
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=_given(body.min_p, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=tuple((body.logit_bias or {}).items()),
        min_new_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


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
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
