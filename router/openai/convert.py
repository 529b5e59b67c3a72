"""OpenAI request bodies -> the front door's types. Pure functions."""

from __future__ import annotations

import uuid

import msgspec

from core.errors import RequestError
from core.wire import SamplingParams
from router.openai.schema import ChatBody, CompletionBody, GenerationBody
from router.text.request import NEUTRAL, ChatPrompt, Prompt, SamplingDefaults, TextRequest

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for plain completions


def chat_request(
    body: ChatBody, caller: str = "", defaults: SamplingDefaults = NEUTRAL
) -> TextRequest:
    """A chat body as the front door takes it."""
    logprobs = bool(body.logprobs)
    prompt = ChatPrompt(
        messages=tuple(body.messages), template_args=body.chat_template_kwargs or {}
    )
    limit = body.max_completion_tokens or body.max_tokens
    sampling = _sampling(body, defaults, logprobs, body.top_logprobs)
    request = _request(body, "chatcmpl", (prompt,), limit, sampling)
    return msgspec.structs.replace(request, caller=caller)


def completion_request(
    body: CompletionBody, caller: str = "", defaults: SamplingDefaults = NEUTRAL
) -> TextRequest:
    """A completion body as the front door takes it; raises RequestError."""
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    runs = _runs(body)
    ranks = runs > (body.n or 1)
    sampling = _sampling(body, defaults, body.logprobs is not None or ranks, body.logprobs)
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


def _sampling(
    body: GenerationBody, defaults: SamplingDefaults, logprobs: bool, top_logprobs: int | None
) -> SamplingParams:
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not available in a stream", param="prompt_logprobs")
    return defaults.params(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(body.top_k, 0),  # -1 is off as well
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=tuple((body.logit_bias or {}).items()),
        min_new_tokens=body.min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt_logprobs=body.prompt_logprobs,
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
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
